# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The pipeline of prefills on Hopper GPUs, written in Gluon: a group's rows meet tiles of keys and values.

That of FlashAttention-3 (Shah et al., 2024). A program's tile of 128 rows is halved between two groups of four warps.
One more warp fills a ring of shared-memory stages by the GPU's copy engine (TMA); a barrier (mbarrier) per stage counts
the bytes that arrived, another one the groups that are done with it. Each group starts the product of its queries with
the next keys before it takes the softmax of the current ones, so that the tensor cores work while it does.

Tiles of keys go from the last to the first: the ones that need a causal mask come first, those at the edge of a sliding
window last. A kernel's `start_scores(queries, keys, stage, S_LAYOUT)` starts the scores [ROWS, KEYS] of the keys in a
stage. Triton's interpreter cannot run Gluon.
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

ROWS = gl.constexpr(64)  # of a group: what one instruction of four warps takes
KEYS = gl.constexpr(128)  # keys of a tile
STAGES = gl.constexpr(2)  # tiles of keys, and of values, that shared memory holds
PANEL = gl.constexpr(64)  # columns that TMA copies at once: 128 bytes, the width of the swizzle
PANEL_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
LOG2_E = 1.4426950408889634
NO_MAX = gl.constexpr(-1.0e30)  # see triton_tile.py


@gluon.jit
def ring():
    """Barriers of a ring of stages: what has come into each, and what both groups are done with."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    return ready, free


@gluon.jit
def online_softmax(b_s, b_max, b_sum, i_n, o_pos, factor, MASKED: gl.constexpr, window=None):
    """One KV tile of the online softmax (Milakov and Gimelshein, 2018): weights exp2(scores - maximum) [ROWS, KEYS] of
    keys from i_n on, then per row the factor of what was summed before, the new maximum, the new sum."""
    if MASKED:
        o_n = i_n + gl.arange(0, b_s.shape[1], layout=gl.SliceLayout(0, b_s.type.layout))
        m_s = o_n[None, :] <= o_pos[:, None]
        if window is not None:
            m_s = m_s & (o_n[None, :] > (o_pos - window)[:, None])
        b_s = gl.where(m_s, b_s, float("-inf"))
    b_new_max = gl.maximum(b_max, gl.max(b_s, 1) * factor)
    b_scale = gl.exp2(b_max - b_new_max)
    b_p = gl.exp2(b_s * factor - b_new_max[:, None])
    return b_p, b_scale, b_new_max, b_sum * b_scale + gl.sum(b_p, 1)


@gluon.jit
def kv_iteration(
    start_scores: gl.constexpr, j, queries, keys, v_smem, k_ready, v_ready, k_free, v_free, b_p, b_acc, b_max, b_sum,
    i_last, count, o_pos, window, factor, before, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of tile j (counted from the last) while the weights b_p of tile j - 1 meet their values."""
    stage = (before + j) % STAGES
    stage_v, phase_v = (before + j - 1) % STAGES, ((before + j - 1) // STAGES) & 1
    b_s = start_scores(queries, keys, stage, S_LAYOUT)
    mbarrier.wait(v_ready.index(stage_v), phase_v)
    b_acc = warpgroup_mma(b_p, v_smem.index(stage_v), b_acc, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=[b_s])
    mbarrier.arrive(k_free.index(stage), count=1)
    i_n = i_last - j * KEYS
    b_weights, b_scale, b_max, b_sum = online_softmax(b_s, b_max, b_sum, i_n, o_pos, factor, MASKED, window)
    b_next = gl.convert_layout(b_weights.to(v_smem.dtype), b_p.type.layout)
    # Waiting for the next keys ends a basic block: the assembler would move the softmax behind the products' end.
    following = before + j + 1
    mbarrier.wait(k_ready.index(following % STAGES), (following // STAGES) & 1, pred=j + 1 < count)
    b_acc, b_p, b_next, b_sum = warpgroup_mma_wait(0, deps=[b_acc, b_p, b_next, b_sum])
    mbarrier.arrive(v_free.index(stage_v), count=1)
    b_acc = b_acc * gl.convert_layout(b_scale, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return b_next, b_acc, b_max, b_sum


@gluon.jit
def zero_unseen(v_part, i_n, lo, hi, LAYOUT: gl.constexpr):
    """Values [KEYS, D] of keys from i_n on: those of keys before lo or from hi on become 0. Slots past the request, and
    blocks that no token sees any more, which may be others' by now, may hold NaN, which a weight of 0 does not hide.

    Both groups do it to a tile, without a barrier between them: so in one pass, which stores the same whenever it has
    read. After a first pass for one bound, and a second one for the other, a group could store what the other had
    zeroed."""
    o_n = i_n + gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    b_v = v_part.load(LAYOUT)
    v_part.store(gl.where(((o_n >= lo) & (o_n < hi))[:, None], b_v, 0.0).to(v_part.dtype))
    fence_async_shared()


@gluon.jit
def attend_tiles(
    start_scores: gl.constexpr, queries, keys, v_smem, k_ready, v_ready, k_free, v_free, i_last, count, num_masked,
    num_full, o_pos, lo, hi, window, factor, LAYOUT: gl.constexpr, before=0,
):  # fmt: skip
    """Sums of `count` tiles [ROWS, D], the last of which begins at key i_last, each row's maximum and total. The first
    num_masked tiles met, and those from num_full on, are not seen whole; keys before lo or from hi on by no row.
    `before`: tiles that have gone through the ring, for a program that attends to several."""
    D: gl.constexpr = v_smem.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    b_max = gl.full([ROWS], NO_MAX, gl.float32, ROW_LAYOUT)
    b_sum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
    # The last tile: only its scores.
    begin, phase = before % STAGES, (before // STAGES) & 1
    mbarrier.wait(k_ready.index(begin), phase)
    b_s = warpgroup_mma_wait(0, deps=[start_scores(queries, keys, begin, S_LAYOUT)])
    mbarrier.arrive(k_free.index(begin), count=1)
    b_weights, _, b_max, b_sum = online_softmax(b_s, b_max, b_sum, i_last, o_pos, factor, True, window)
    b_p = gl.convert_layout(b_weights.to(v_smem.dtype), P_LAYOUT)
    if (i_last + KEYS > hi) | (i_last < lo):
        mbarrier.wait(v_ready.index(begin), phase)
        zero_unseen(v_smem.index(begin), i_last, lo, hi, LAYOUT)
    b_acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    mbarrier.wait(k_ready.index((before + 1) % STAGES), ((before + 1) // STAGES) & 1, pred=count > 1)
    for j in range(1, num_masked):
        b_p, b_acc, b_max, b_sum = kv_iteration(
            start_scores, j, queries, keys, v_smem, k_ready, v_ready, k_free, v_free, b_p, b_acc, b_max, b_sum,
            i_last, count, o_pos, window, factor, before, S_LAYOUT, O_LAYOUT, True,
        )  # fmt: skip
    for j in range(gl.maximum(num_masked, 1), num_full):
        b_p, b_acc, b_max, b_sum = kv_iteration(
            start_scores, j, queries, keys, v_smem, k_ready, v_ready, k_free, v_free, b_p, b_acc, b_max, b_sum,
            i_last, count, o_pos, window, factor, before, S_LAYOUT, O_LAYOUT, False,
        )  # fmt: skip
    if window is not None:
        for j in range(gl.maximum(gl.maximum(num_masked, 1), num_full), count):
            b_p, b_acc, b_max, b_sum = kv_iteration(
                start_scores, j, queries, keys, v_smem, k_ready, v_ready, k_free, v_free, b_p, b_acc, b_max, b_sum,
                i_last, count, o_pos, window, factor, before, S_LAYOUT, O_LAYOUT, True,
            )  # fmt: skip
    # The first tile's values.
    stage, phase = (before + count - 1) % STAGES, ((before + count - 1) // STAGES) & 1
    mbarrier.wait(v_ready.index(stage), phase)
    if window is not None:
        i_first = i_last - (count - 1) * KEYS
        if (count > 1) & (i_first < lo):
            zero_unseen(v_smem.index(stage), i_first, lo, hi, LAYOUT)
    b_acc = warpgroup_mma(b_p, v_smem.index(stage), b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])
    return b_acc, b_max, b_sum
