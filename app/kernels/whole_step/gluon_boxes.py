# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Copies of a whole step's weights in bf16 by loops that are not unrolled, in Gluon: a layer's code is run once a
layer, so what does not fit into the instruction cache is fetched again and again.

How many boxes a stage has comes as a number that the compiler does not know.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from app.kernels.whole_step.gluon_copies import WIDE, room


@gluon.jit
def bring(
    d_lines, pieces, ready, free, i, line, step, boxes, GROUP: gl.constexpr, CL: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, FEWER: gl.constexpr = 0,
):  # fmt: skip
    """A stage of GROUP boxes of CL lines from `line` on, each `step` lines behind the one before; or of FEWER, if there
    are no more."""
    stage = room(ready, free, i, STAGES, AHEAD)
    if FEWER > 0:
        if boxes < GROUP:
            mbarrier.expect(ready.index(stage), FEWER * CL * WIDE * 2)
        else:
            mbarrier.expect(ready.index(stage), GROUP * CL * WIDE * 2)
    else:
        mbarrier.expect(ready.index(stage), GROUP * CL * WIDE * 2)
    for b in range(boxes):
        tma.async_copy_global_to_shared(
            d_lines, [line + b * step, 0], ready.index(stage), pieces.index(stage * GROUP + b)
        )
    return i + 1


@gluon.jit
def bring_rows(
    d_lines, pieces, ready, free, i, base, row, groups, boxes, LINES: gl.constexpr, GROUP: gl.constexpr,
    CL: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, SECOND: gl.constexpr = 0,
):  # fmt: skip
    """Groups of GROUP rows of a weight from `row` on, of LINES lines each; SECOND: of every other group another row
    (gate, up)."""
    for g in range(groups):
        if SECOND > 0:
            first = row + (g // 2) * GROUP + (g % 2) * SECOND
        else:
            first = row + g * GROUP
        for c in range(LINES // CL):
            line = base + first * LINES + c * CL
            i = bring(d_lines, pieces, ready, free, i, line, LINES, boxes, GROUP, CL, STAGES, AHEAD)
    return i
