# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The weights and cached keys and values that a program of a whole step reads, copied ahead in its order, in Gluon.

Memory is seen as lines of 128 bytes, whatever lies in it, so one descriptor of the copy engine (TMA) serves all of it.
A stage of the ring has GROUP boxes of CL lines: of as many rows of a weight, or of blocks of the cache.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from app.kernels.whole_step.gluon_nibbles import arrivals, bring_sides, is_of_nibbles, sides_of

WIDE = gl.constexpr(64)  # words of 16 bits in a line: as many numbers, or PARTS times as many
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # as two versions of Triton name it


@gluon.jit
def splits_of(pos, SPLITS: gl.constexpr, FEW: gl.constexpr, LONG: gl.constexpr, TOKENS: gl.constexpr, S: gl.constexpr):
    """Tokens of a split of the `pos` tokens before this one, whole blocks of S, and how many splits there are: FEW at
    most, where these are no more than LONG, else SPLITS at most; none has less than TOKENS, but the last."""
    each = gl.cdiv(pos, gl.where(pos > LONG, SPLITS, FEW))
    each = gl.cdiv(gl.maximum(each, TOKENS), S) * S
    return each, gl.maximum(gl.cdiv(pos, each), 1)


@gluon.jit
def room(ready, free, i, STAGES: gl.constexpr, AHEAD: gl.constexpr):
    """Waits until the next stage is free, and fewer than AHEAD are on their way; which it is. Whoever asks for a number
    that others write waits behind all that is on its way, so more than keeps the memory busy costs time."""
    stage = i % STAGES
    mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
    if AHEAD < STAGES:
        o = i + STAGES - AHEAD
        mbarrier.wait(ready.index(o % STAGES), ((o // STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def copy_rows(
    d_lines, pieces, ready, free, i, base, row, LINES: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, GROUPS,
    SECOND, STAGES: gl.constexpr, AHEAD: gl.constexpr, FORM: gl.constexpr, N: gl.constexpr = 0, p_base=None,
    p_place=None, scale_smem=None,
):  # fmt: skip
    """GROUPS groups of rows of a weight from `row` on; SECOND: of every other group another row (gate, up). Rows that
    have fewer lines than a stage has of one lie one behind the other in it. Of nibbles [N, ..] also what stands beside
    them, from p_place on."""
    OF_ROW: gl.constexpr = CL if LINES > CL else LINES  # lines in a stage
    if is_of_nibbles(FORM):
        sides = sides_of(p_base, p_place, row, N, GROUP, CL, FORM)
    for g in range(GROUPS):
        if SECOND > 0:
            first = row + (g // 2) * GROUP + (g % 2) * SECOND
        else:
            first = row + g * GROUP
        for c in range((LINES + CL - 1) // CL):
            stage = room(ready, free, i, STAGES, AHEAD)
            mbarrier.expect(ready.index(stage), GROUP * OF_ROW * WIDE * 2)
            for r in gl.static_range(GROUP * OF_ROW // CL):
                line = base + first * LINES + r * CL if LINES < CL else base + (first + r) * LINES + c * CL
                tma.async_copy_global_to_shared(d_lines, [line, 0], ready.index(stage), pieces.index(stage * GROUP + r))
            if is_of_nibbles(FORM):
                bring_sides(sides, scale_smem, ready, stage, c * (2 * CL * N) + first - row, GROUP, CL, FORM)
            i += 1
    return i


@gluon.jit
def copy_context(
    d_lines, pieces, ready, free, i, base, p_table, pos, i_kv, i_split, KH: gl.constexpr, D: gl.constexpr,
    SPLITS: gl.constexpr, FEW: gl.constexpr, LONG: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, S: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Keys and values of one of a head's splits."""
    LINES: gl.constexpr = D // WIDE
    TOKENS: gl.constexpr = CL // LINES  # in a box
    each, num = splits_of(pos, SPLITS, FEW, LONG, GROUP * TOKENS, S)
    if (i_kv < KH) & (i_split < num):
        end = gl.minimum((i_split + 1) * each, pos)
        for first in range(i_split * each, end, GROUP * TOKENS):
            tokens = gl.tuple(())
            blocks = gl.tuple(())
            for r in gl.static_range(GROUP):  # all are on their way before a copy is told
                tokens = tokens + gl.tuple((gl.minimum(first + r * TOKENS, (end - 1) // TOKENS * TOKENS),))
                blocks = blocks + gl.tuple((gl.load(p_table + tokens[r] // S),))
            for part in gl.static_range(2):
                stage = room(ready, free, i, STAGES, AHEAD)
                mbarrier.expect(ready.index(stage), GROUP * CL * WIDE * 2)
                for r in gl.static_range(GROUP):
                    line = base + ((blocks[r] * 2 + part) * KH + i_kv) * (S * LINES) + (tokens[r] % S) * LINES
                    tma.async_copy_global_to_shared(
                        d_lines, [line, 0], ready.index(stage), pieces.index(stage * GROUP + r)
                    )
                if arrivals(FORM) > 1:
                    mbarrier.arrive(ready.index(stage), count=arrivals(FORM) - 1)
                i += 1
    return i
