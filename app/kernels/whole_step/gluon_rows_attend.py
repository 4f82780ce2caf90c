# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Contexts of the rows of a whole step of several, in Gluon: a program attends for one head of keys and values over a
part of one row's context (`gluon_attend`).

Where rows are about as long as each other, all have as many parts at most, which whoever reads them puts together.
Where some are far longer, rows have as many parts as their contexts are long, and who comes last of a row's programs
puts these together for all.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from app.kernels.whole_step.gluon_attend import LOWEST
from app.kernels.whole_step.gluon_copies import WIDE, room, thread_barrier
from app.kernels.whole_step.gluon_rows import PART, D, all_parts_stored, store_part

WORTH = gl.constexpr(192)  # tokens that a program attends over while one puts parts together for all


@gluon.jit
def parts_of_rows(p_len, size, ROWS: gl.constexpr):
    """Counts the parts of `size` tokens that each row has: one at least, for the token that is new."""
    counts = gl.tuple(())
    for q in gl.static_range(ROWS):
        length = gl.maximum(gl.load(p_len + q) - 1, 0)
        counts = counts + gl.tuple((gl.maximum(gl.cdiv(length, size), 1),))
    return counts


@gluon.jit
def places_of(counts, o_row):
    """Counts the parts that lie before those of each of these rows, and theirs."""
    before, own = o_row * 0, o_row * 0
    for q in gl.static_range(len(counts)):
        before += gl.where(o_row > q, counts[q], 0)
        own += gl.where(o_row == q, counts[q], 0)
    return before, own


@gluon.jit
def part_size(p_len, ROWS: gl.constexpr, SLOTS: gl.constexpr, S: gl.constexpr, WARPS: gl.constexpr):
    """Tokens of a part of a context, S or a multiple, and whether no row has more than SLOTS / ROWS of them. Else it is
    the smallest size with which all rows together have no more than SLOTS."""
    SIZES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ROWS, ROWS], [WARPS, 1], [1, 0])
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SIZES))
    o_less = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, SIZES))
    lens = gl.maximum(gl.load(p_len + o_row) - 1, 0)
    even = gl.maximum(gl.cdiv(gl.cdiv(gl.max(lens, 0), SLOTS // ROWS), S) * S, S)
    # A row has one part more than its share, at most: so some of these sizes fit.
    sizes = gl.maximum(gl.cdiv(gl.cdiv(gl.sum(lens, 0), SLOTS - o_less), S) * S, S)
    counts = gl.maximum(gl.cdiv(lens[None, :], sizes[:, None]), 1)
    least = -gl.max(gl.where(gl.sum(counts, 1) <= SLOTS, -sizes, -(1 << 30)), 0)
    is_even = even <= least + WORTH
    return gl.where(is_even, even, least), is_even


@gluon.jit
def row_of(counts, i_slot):
    """The row that has a part, or their number."""
    row, end = i_slot * 0, i_slot * 0
    for q in gl.static_range(len(counts)):
        end += counts[q]
        row += gl.where(end <= i_slot, 1, 0)
    return row


@gluon.jit
def copy_part(
    d_lines, pieces, ready, free, i, base, p_table, begin, end, i_kv, KH: gl.constexpr, GROUP: gl.constexpr,
    CL: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Keys and values of one head from token begin to end."""
    LINES: gl.constexpr = D // WIDE
    TOKENS: gl.constexpr = CL // LINES  # in a box
    for first in range(begin, end, GROUP * TOKENS):
        tokens = gl.tuple(())
        blocks = gl.tuple(())
        for r in gl.static_range(GROUP):  # all are on their way before a copy is told
            tokens = tokens + gl.tuple((gl.minimum(first + r * TOKENS, (end - 1) // TOKENS * TOKENS),))
            blocks = blocks + gl.tuple((gl.load(p_table + tokens[r] // S),))
        for part in gl.static_range(2):
            stage = room(ready, free, i, STAGES, STAGES)
            mbarrier.expect(ready.index(stage), GROUP * CL * WIDE * 2)
            for r in gl.static_range(GROUP):
                line = base + ((blocks[r] * 2 + part) * KH + i_kv) * (S * LINES) + (tokens[r] % S) * LINES
                tma.async_copy_global_to_shared(d_lines, [line, 0], ready.index(stage), pieces.index(stage * GROUP + r))
            i += 1
    return i


@gluon.jit
def merge_parts(
    p_parts, p_sums, p_out, p_counter, i_kv, count, HEADS: gl.constexpr, QH: gl.constexpr, SLOTS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Puts a row's `count` parts together, which begin at p_parts, in the last of the programs that have one."""
    PARTS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    thread_barrier()
    arrived = gl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu")
    if arrived == count - 1:
        gl.store(p_counter, 0)
        o_s = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, PARTS))
        o_d = gl.arange(0, D, layout=gl.SliceLayout(0, PARTS))
        for h in range(HEADS):
            o = o_s * QH + i_kv * HEADS + h
            b_top = gl.load(p_sums + o, mask=o_s < count, other=LOWEST, cache_modifier=".cg")
            b_share = gl.load(p_sums + SLOTS * QH + o, mask=o_s < count, other=0.0, cache_modifier=".cg")
            b_parts = gl.load(
                p_parts + o[:, None] * D + o_d[None, :], mask=(o_s < count)[:, None] & (o_d < D)[None, :], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            b_share *= gl.exp2(b_top - gl.max(b_top, 0))
            b_share /= gl.sum(b_share, 0)
            b_o = gl.sum(b_parts.to(gl.float32) * b_share[:, None], 0)
            gl.store(p_out + (i_kv * HEADS + h) * D + o_d, b_o.to(gl.bfloat16))


@gluon.jit
def some_parts(
    p_parts, o, m_own, FIRST: gl.constexpr, COUNT: gl.constexpr, QH: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """COUNT parts of the vectors that each split of the rows gave."""
    parts = gl.tuple(())
    for s in gl.static_range(SPLITS):
        for c in gl.static_range(FIRST, FIRST + COUNT):
            p_part = p_parts + (s * (QH * D) + c * PART) + o
            parts = parts + gl.tuple((gl.load(p_part, mask=m_own > s, other=0.0, cache_modifier=".cg"),))
    return parts


@gluon.jit
def attended_rows(
    p_parts, p_sums, o, m_own, o_own, m_s, x_smem, share_smem, QH: gl.constexpr, SLOTS: gl.constexpr,
    ROWS: gl.constexpr, WARPS: gl.constexpr, XB: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Writes what all heads of all rows gave, of SLOTS / ROWS parts of each context at most, into x_smem. o [ROWS,
    PART], m_own: where the rows' first parts lie, and how many they have; o_own [1, ROWS * QH], m_s: the same of what
    they count, in x_smem's order."""
    HEADS: gl.constexpr = PART // D  # of a part of the vectors
    SPLITS: gl.constexpr = SLOTS // ROWS
    COUNT: gl.constexpr = QH // HEADS  # parts of the vectors
    BYTES: gl.constexpr = 2 * PART * ROWS * SPLITS * COUNT // (32 * WARPS)  # of a thread
    EACH: gl.constexpr = COUNT // 2 if BYTES > 512 else COUNT  # as many as there are registers for
    parts = some_parts(p_parts, o, m_own, 0, EACH, QH, SPLITS)
    o_split = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, SL))[:, None]
    p_sum = p_sums + o_split * QH + o_own
    b_top = gl.load(p_sum, mask=o_split < m_s, other=LOWEST, cache_modifier=".cg")
    b_share = gl.load(p_sum + SLOTS * QH, mask=o_split < m_s, other=0.0, cache_modifier=".cg")
    b_share *= gl.exp2(b_top - gl.max(b_top, 0)[None, :])
    share_smem.store(b_share / gl.sum(b_share, 0)[None, :])
    thread_barrier()
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shares = share_smem._reinterpret(gl.float32, [SPLITS * COUNT, ROWS, HEADS], FLAT)
    for c in gl.static_range(COUNT):
        if c == EACH:
            parts = some_parts(p_parts, o, m_own, EACH, COUNT - EACH, QH, SPLITS)
        b_o = gl.reshape(gl.zeros([ROWS, PART], gl.float32, XB), [ROWS, HEADS, D])
        for s in gl.static_range(SPLITS):
            b_part = gl.reshape(parts[s * EACH + c % EACH].to(gl.float32), [ROWS, HEADS, D])
            b_own = shares.index(s * COUNT + c).load(gl.SliceLayout(2, b_o.type.layout))
            b_o += gl.expand_dims(b_own, 2) * b_part
        store_part(x_smem, c, gl.reshape(b_o.to(gl.bfloat16), [ROWS, PART]), ROWS)
    all_parts_stored()
