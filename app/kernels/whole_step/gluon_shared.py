# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Experts of a whole step beside which some stand that every token goes to, in Gluon.

These lie behind the others, and come first in what is read and multiplied, as nobody need choose them: their rows of
gate and up are on their way while the others are scored. A row of down has any number of lines: the rows that a program
has of an expert lie in one piece, which is cut into stages wherever it must be; a line meets all lines of what the
expert read on the tensor cores, and the products with its own one count, for its own row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from app.kernels.whole_step.gluon_attend import LOG2E
from app.kernels.whole_step.gluon_boxes import bring, bring_rows
from app.kernels.whole_step.gluon_copies import WIDE, thread_barrier
from app.kernels.whole_step.gluon_experts import read_numbers
from app.kernels.whole_step.gluon_pairs import release_all

LEAST = gl.constexpr(-2147483648)


@gluon.jit
def key_of(b_scores):
    """Numbers of 32 bits in the same order."""
    b_bits = (b_scores + 0.0).to(gl.int32, bitcast=True)
    return gl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@gluon.jit
def choose_exactly(p_scores, p_choice, E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr, BT: gl.constexpr,
                   SHARED: gl.constexpr):  # fmt: skip
    """One warp: waits for all scores, which are in fp32; the best TOP experts, the best first, of equal ones the one
    with the lower number. Writes weights: 1 of each shared one, then the softmax of the chosen over all."""
    SCORES: gl.constexpr = gl.BlockedLayout([BE // 32 if BE > 32 else 1], [32], [1], [0])
    CHOICE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    o_e = gl.arange(0, BE, layout=SCORES)
    o_k = gl.arange(0, BT, layout=CHOICE)
    p_own = p_scores + gl.minimum(o_e, E - 1)
    b_scores = read_numbers(p_own)
    while gl.max(gl.where(b_scores == b_scores, 0, 1), 0) > 0:
        b_scores = read_numbers(p_own)
    b_keys = gl.where(o_e < E, key_of(b_scores), LEAST)
    ids = gl.tuple(())
    b_best = gl.zeros([BT], gl.int32, CHOICE)
    for k in gl.static_range(TOP):
        best = gl.max(b_keys, 0)
        expert = BE - gl.max(gl.where((b_keys == best) & (o_e < E), BE - o_e, 0), 0)
        b_keys = gl.where(o_e == expert, LEAST, b_keys)
        ids = ids + gl.tuple((expert,))
        b_best = gl.where(o_k == k + SHARED, best, b_best)
    top = gl.max(gl.where(o_e < E, b_scores, -float("inf")), 0)
    total = gl.sum(gl.where(o_e < E, gl.exp2((b_scores - top) * LOG2E), 0.0), 0)
    b_own = gl.where(b_best < 0, b_best ^ 0x7FFFFFFF, b_best).to(gl.float32, bitcast=True)
    b_weights = gl.where(o_k < SHARED, 1.0, gl.exp2((b_own - top) * LOG2E) / total)
    gl.store(p_choice + o_k, b_weights, mask=o_k < SHARED + TOP)
    return ids


@gluon.jit
def id_of(ids, k, E: gl.constexpr, TOP: gl.constexpr, SHARED: gl.constexpr):
    """The expert in place k: the shared ones come first."""
    found = E + k
    for j in gl.static_range(TOP):
        found = gl.where(k == SHARED + j, ids[j], found)
    return found


@gluon.jit
def own_pairs(i_p, F: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, SHARED: gl.constexpr,
              PAIRS: gl.constexpr):  # fmt: skip
    """Groups of rows of gate and up that a program has: the first of the shared experts' and how many, as even as can
    be, and the first of the chosen ones', which make them PAIRS."""
    OF_ALL: gl.constexpr = SHARED * (F // GROUP)
    first = i_p * OF_ALL // PROGRAMS
    return first, (i_p + 1) * OF_ALL // PROGRAMS - first, i_p * PAIRS - first


@gluon.jit
def copy_all_experts(
    d_lines, pieces, ready, free, i, chosen, gate, down, p_scores, p_choice, i_p, boxes, H: gl.constexpr,
    F: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr, BT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """This program's rows of gate and up, the shared experts' before anything is chosen, and of all experts' down."""
    OF_ONE: gl.constexpr = F // GROUP
    PAIRS: gl.constexpr = (TOP + SHARED) * F // (PROGRAMS * GROUP)
    LINES: gl.constexpr = F // WIDE  # of a row of down
    OWN: gl.constexpr = H // PROGRAMS
    BOXES: gl.constexpr = OWN * LINES // CL  # of an expert
    first, shared, routed = own_pairs(i_p, F, GROUP, PROGRAMS, SHARED, PAIRS)
    for g in range(first, first + shared):
        row = (E + g // OF_ONE) * (2 * F) + g % OF_ONE * GROUP
        i = bring_rows(d_lines, pieces, ready, free, i, gate, row, 2, boxes, H // WIDE, GROUP, CL, STAGES, AHEAD, F)
    ids = choose_exactly(p_scores, p_choice, E, BE, TOP, BT, SHARED)
    thread_barrier()
    mbarrier.arrive(chosen, count=1)
    for g in range(routed, routed + PAIRS - shared):
        row = id_of(ids, SHARED + g // OF_ONE, E, TOP, SHARED) * (2 * F) + g % OF_ONE * GROUP
        i = bring_rows(d_lines, pieces, ready, free, i, gate, row, 2, boxes, H // WIDE, GROUP, CL, STAGES, AHEAD, F)
    for first_box in range(0, BOXES, boxes):
        for k in range(TOP + SHARED):
            line = down + (id_of(ids, k, E, TOP, SHARED) * H + i_p * OWN) * LINES + first_box * CL
            many = gl.minimum(BOXES - first_box, boxes)
            i = bring(d_lines, pieces, ready, free, i, line, CL, many, GROUP, CL, STAGES, AHEAD, BOXES % GROUP)
    return i


@gluon.jit
def activated_places(o_row, i_p, F: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, SHARED: gl.constexpr,
                     PAIRS: gl.constexpr):  # fmt: skip
    """Tells which of the numbers that all experts activate are this program's."""
    first, shared, routed = own_pairs(i_p, F, GROUP, PROGRAMS, SHARED, PAIRS)
    o_g = o_row // GROUP
    o_pair = gl.where(o_g < shared, first + o_g, SHARED * (F // GROUP) + routed + o_g - shared)
    return o_pair * GROUP + o_row % GROUP


@gluon.jit
def all_down(
    x_smem, w_smem, ready, free, row_smem, p_act, i, boxes, F: gl.constexpr, OWN: gl.constexpr, COUNT: gl.constexpr,
    BL: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Writes into row_smem [BL] the sums over all experts of products of OWN rows of down with what they activated;
    BL: a power of 2, at least a row's lines, and OWN."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BL, 16])
    LINES: gl.constexpr = F // WIDE
    BOXES: gl.constexpr = OWN * LINES // CL
    BATCH: gl.constexpr = 4 if COUNT % 4 == 0 else 2 if COUNT % 2 == 0 else 1  # experts without a wait between
    given = x_smem._reinterpret(gl.bfloat16, [COUNT, BL, WIDE], x_smem.layout)
    o_l = gl.arange(0, BL, layout=gl.SliceLayout(1, ROW))[:, None]
    o_k = gl.arange(0, WIDE, layout=gl.SliceLayout(0, ROW))[None, :]
    rows = gl.tuple(())
    for k in gl.static_range(COUNT):
        p_own = p_act + k * F + o_l * WIDE + o_k
        rows = rows + gl.tuple((gl.load(p_own, mask=o_l < LINES, other=0.0, cache_modifier=".cg"),))
    for k in gl.static_range(COUNT):
        given.index(k).store(rows[k])
    fence_async_shared()
    thread_barrier()
    o_m = gl.arange(0, GROUP * CL, layout=gl.SliceLayout(1, MMA))
    o_n = gl.arange(0, BL, layout=gl.SliceLayout(0, MMA))
    b_rows = gl.zeros([GROUP * CL, BL], gl.float32, MMA)
    for first_box in range(0, BOXES, boxes):
        b_acc = gl.zeros([GROUP * CL, BL], gl.float32, MMA)
        for first_k in range(0, COUNT, BATCH):
            for k in gl.static_range(BATCH):
                stage = (i + k) % STAGES
                mbarrier.wait(ready.index(stage), ((i + k) // STAGES) & 1)
                x = given.index(first_k + k).permute((1, 0))
                b_acc = warpgroup_mma(w_smem.index(stage), x, b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(0, deps=[b_acc])
            release_all(free, i, BATCH, STAGES)
            i += BATCH
        o_line = first_box * CL + o_m  # of an expert's; behind the last ones lies what was there before
        m_own = ((o_line % LINES)[:, None] == o_n[None, :]) & (o_line < OWN * LINES)[:, None]
        b_line = gl.sum(gl.where(m_own, b_acc, 0.0), 1)
        b_rows += gl.where((o_line // LINES)[:, None] == o_n[None, :], b_line[:, None], 0.0)
    row_smem.store(gl.sum(b_rows, 0))
    thread_barrier()
    return i
