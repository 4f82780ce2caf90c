# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of a whole step with rows in bf16, two groups at a time, in Gluon: their stages are multiplied one behind
the other without a wait between, and let go together."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from app.kernels.whole_step.gluon_copies import thread_barrier
from app.kernels.whole_step.gluon_forms import plain_group


@gluon.jit
def release_all(free, i, COUNT: gl.constexpr, STAGES: gl.constexpr):
    """Lets COUNT stages go that only the tensor cores have read, or plain loads before a fence."""
    thread_barrier()  # one thread tells for all
    for c in gl.static_range(COUNT):
        mbarrier.arrive(free.index((i + c) % STAGES), count=1)


@gluon.jit
def own_sums(b_acc, GROUP: gl.constexpr, CL: gl.constexpr):
    """Sums of the products of a group's lines with their own ones: [GROUP]."""
    MMA: gl.constexpr = b_acc.type.layout
    o_m = gl.arange(0, GROUP * CL, layout=gl.SliceLayout(1, MMA))
    o_n = gl.arange(0, CL, layout=gl.SliceLayout(0, MMA))
    b_own = gl.where((o_m % CL)[:, None] == o_n[None, :], b_acc, 0.0)
    return gl.sum(gl.reshape(gl.sum(b_own, 1), [GROUP, CL]), 1)


@gluon.jit
def two_groups(
    x_smem, w_smem, ready, free, i, CHUNKS: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Products of two groups of rows with x."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CL, 16])
    b_first = gl.zeros([GROUP * CL, CL], gl.float32, MMA)
    b_second = gl.zeros([GROUP * CL, CL], gl.float32, MMA)
    for c in gl.static_range(2 * CHUNKS):
        stage = (i + c) % STAGES
        mbarrier.wait(ready.index(stage), ((i + c) // STAGES) & 1)
        x = x_smem.index(c % CHUNKS).permute((1, 0))
        if c < CHUNKS:
            b_first = warpgroup_mma(w_smem.index(stage), x, b_first, is_async=True)
        else:
            b_second = warpgroup_mma(w_smem.index(stage), x, b_second, is_async=True)
    b_first, b_second = warpgroup_mma_wait(0, deps=[b_first, b_second])
    release_all(free, i, 2 * CHUNKS, STAGES)
    return own_sums(b_first, GROUP, CL), own_sums(b_second, GROUP, CL), i + 2 * CHUNKS


@gluon.jit
def pairs_of_rows(
    x_smem, w_smem, ready, free, out_smem, i, first, end, STEP: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr,
    CL: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Writes products of pairs of groups of rows with x into out_smem: the second group's STEP groups behind the
    first's."""
    for g in range(first, end):
        b_first, b_second, i = two_groups(x_smem, w_smem, ready, free, i, CHUNKS, GROUP, CL, STAGES, WARPS)
        at = g if STEP > 1 else 2 * g
        out_smem.index(at).store(b_first)
        out_smem.index(at + STEP).store(b_second)
    return i


@gluon.jit
def rows_in_pairs(
    x_smem, w_smem, ready, free, out_smem, i, groups, CHUNKS: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Writes products of some groups of rows with x into out_smem, one behind the other."""
    i = pairs_of_rows(
        x_smem, w_smem, ready, free, out_smem, i, 0, groups // 2, 1, CHUNKS, GROUP, CL, STAGES, WARPS
    )  # fmt: skip
    if groups % 2 > 0:
        b_last, i = plain_group(x_smem, w_smem, ready, free, i, CHUNKS, GROUP, CL, CL, STAGES, WARPS)
        out_smem.index(groups - 1).store(b_last)
    thread_barrier()
    return i
