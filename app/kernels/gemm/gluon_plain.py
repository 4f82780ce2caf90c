# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of few rows with plain 16-bit weights on Hopper GPUs, in Gluon: the weight is on its way before the launch
before has ended.

One warp copies blocks of the weight by the GPU's copy engine (TMA) into a ring of stages. Nothing in a step writes
weights (layers that copy theirs in have other products), so it fills the ring first and only then waits for whatever
wrote the rows of x. Each launch lets the
next one begin as soon as it has waited itself: where a program ends, one of the next launch takes its place and reads
its weight while others still multiply. The weight is the left operand of the tensor cores' asynchronous products and
the rows of x are the right one, both in shared memory. Triton's interpreter cannot run Gluon; the tests of this file
need the GPU.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from app.kernels.gemm.gluon_packed import activate
from app.kernels.gemm.gluon_wide import thread_barrier
from app.kernels.quick_launch import quick_launch

DEPTH = gl.constexpr(64)  # of K, in a box of the copy engine: what 128 bytes hold


@gluon.jit
def wait_for_the_launch_before():
    """Until all that it wrote is there."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_the_next_launch_begin():
    """It waits itself before it reads what this one writes."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copy_weight(
    d_weight, w_smem, ready, stage, i_n, i_k, half, TILE: gl.constexpr, BOXES: gl.constexpr, GATED: gl.constexpr
):
    """A stage's boxes of the weight; of gate and up half of the rows each."""
    for j in gl.static_range(BOXES):
        column = (i_k * BOXES + j) * DEPTH
        if GATED:
            place = w_smem.index(stage * BOXES + j)
            first = i_n * (TILE // 2)
            tma.async_copy_global_to_shared(d_weight, [first, column], ready.index(stage), place.slice(0, TILE // 2))
            tma.async_copy_global_to_shared(
                d_weight, [half + first, column], ready.index(stage), place.slice(TILE // 2, TILE // 2)
            )
        else:
            tma.async_copy_global_to_shared(
                d_weight, [i_n * TILE, column], ready.index(stage), w_smem.index(stage * BOXES + j)
            )


@gluon.jit
def copy_rows(d_x, x_smem, ready, stage, i_k, BOXES: gl.constexpr):
    """A stage's boxes of x."""
    for j in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(
            d_x, [0, (i_k * BOXES + j) * DEPTH], ready.index(stage), x_smem.index(stage * BOXES + j)
        )


@gluon.jit
def copy_partition(
    d_x, d_weight, x_smem, w_smem, ready, free, i_n, first, count, half,
    BM: gl.constexpr, TILE: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """One warp: all stages."""
    BYTES: gl.constexpr = (TILE + BM) * DEPTH * BOXES * 2
    ahead = gl.minimum(count, STAGES)
    for i in range(ahead):
        mbarrier.expect(ready.index(i), BYTES)
        copy_weight(d_weight, w_smem, ready, i, i_n, first + i, half, TILE, BOXES, GATED)
    if EARLY:
        wait_for_the_launch_before()
    for i in range(ahead):
        copy_rows(d_x, x_smem, ready, i, first + i, BOXES)
    for i in range(ahead, count):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), BYTES)
        copy_weight(d_weight, w_smem, ready, stage, i_n, first + i, half, TILE, BOXES, GATED)
        copy_rows(d_x, x_smem, ready, stage, first + i, BOXES)


@gluon.jit
def multiply_partition(
    x_smem, w_smem, ready, free, p_squares, p_bias, p_residual, p_norm, p_shares, p_arrived, p_out, p_rows,
    p_new_squares, T, N, K, stride_residual, eps, i_n, i_split, count,
    BM: gl.constexpr, TILE: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    ACT: gl.constexpr, P: gl.constexpr, BP: gl.constexpr, SPLITS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Four warps: the products, and what follows them."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(1, MMA)
    if EARLY:  # also before anything is written: memory that is used again may still be read
        wait_for_the_launch_before()
        let_the_next_launch_begin()
    THREADS: gl.constexpr = BP if BP < 32 else 32
    SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // THREADS, THREADS], [4, 1], [1, 0])
    if p_squares is not None:  # before the loop, so that they are on their way with the rows
        o_t = gl.arange(0, BM, layout=gl.SliceLayout(1, SQUARES))[:, None]
        o_p = gl.arange(0, BP, layout=gl.SliceLayout(0, SQUARES))[None, :]
        b_squares = gl.load(p_squares + o_t * P + o_p, mask=(o_t < T) & (o_p < P), other=0.0)
        b_rms = gl.convert_layout(gl.rsqrt(gl.sum(b_squares, 1) / K + eps), gl.SliceLayout(0, MMA))
    b_acc = gl.zeros([TILE, BM], gl.float32, MMA)
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        for j in gl.static_range(BOXES):
            b_x = x_smem.index(stage * BOXES + j).permute((1, 0))
            b_acc = warpgroup_mma(w_smem.index(stage * BOXES + j), b_x, b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        mbarrier.arrive(free.index(stage), count=1)
    is_last = True
    if SPLITS > 1:
        o_r = gl.arange(0, TILE, layout=COLUMN)[:, None]
        o_c = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))[None, :]
        p_own = p_shares + i_n * (SPLITS * TILE * BM) + (o_r * BM + o_c)
        gl.store(p_own + i_split * (TILE * BM), b_acc)
        thread_barrier()  # all threads have stored before one of them says so
        arrived = gl.atomic_add(p_arrived + i_n, 1, sem="acq_rel")
        is_last = arrived == SPLITS - 1
        if is_last:
            thread_barrier()
            gl.store(p_arrived + i_n, 0)  # for the next launch
            # The own share, too, is read again: whoever is last adds up the same numbers in the same order.
            b_acc = gl.load(p_own, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                b_acc += gl.load(p_own + other * (TILE * BM), cache_modifier=".cg")
    if is_last:
        if p_squares is not None:
            b_acc *= b_rms[None, :]
        if p_bias is not None:
            o_row = gl.arange(0, TILE, layout=COLUMN)
            if GATED:
                o_half = i_n * (TILE // 2) + o_row % (TILE // 2)
                o_b = gl.where(o_half < N // 2, (N // 2) * (o_row // (TILE // 2)) + o_half, N)
            else:
                o_b = i_n * TILE + o_row
            b_acc += gl.load(p_bias + o_b, mask=o_b < N, other=0.0).to(gl.float32)[:, None]
        finish(
            b_acc, p_residual, p_norm, p_out, p_rows, p_new_squares, T, N, stride_residual, i_n, BM, TILE, GATED, ACT,
        )  # fmt: skip


@gluon.jit
def finish(
    b_acc, p_residual, p_norm, p_out, p_rows, p_new_squares, T, N, stride_residual, i_n,
    BM: gl.constexpr, TILE: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """The activation, or the sum with the residual and the beginning of the norm; writes rows."""
    DTYPE: gl.constexpr = p_out.dtype.element_ty
    WIDTH: gl.constexpr = TILE // 2 if GATED else TILE
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    if GATED:
        b_both = gl.reshape(b_acc.to(DTYPE).to(gl.float32), [2, WIDTH, BM])
        b_gate, b_up = gl.split(gl.permute(b_both, (1, 2, 0)))
        b_tile = (activate(b_gate, ACT) * b_up).to(DTYPE)
        width = N // 2
    else:
        b_tile = b_acc.to(DTYPE)
        width = N
    b_out = gl.convert_layout(b_tile, OUT)
    o_c = i_n * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, OUT))
    o_m = gl.arange(0, BM, layout=gl.SliceLayout(0, OUT))
    m = (o_m < T)[None, :] & (o_c < width)[:, None]
    o = o_m.to(gl.int64)[None, :] * width + o_c[:, None]
    if p_residual is not None:
        p_own = p_residual + o_m.to(gl.int64)[None, :] * stride_residual + o_c[:, None]
        b_out = (b_out.to(gl.float32) + gl.load(p_own, mask=m, other=0.0).to(gl.float32)).to(DTYPE)
    gl.store(p_out + o, b_out, mask=m)
    if p_norm is not None:
        b_total = b_out.to(gl.float32)  # the norm is that of what is stored
        b_norm = gl.load(p_norm + o_c, mask=o_c < N, other=0.0).to(gl.float32)[:, None]
        gl.store(p_rows + o, (b_total * b_norm).to(DTYPE), mask=m)
        b_sums = gl.sum(gl.where(m, b_total * b_total, 0.0), 0)
        gl.store(p_new_squares + o_m * gl.num_programs(0) + i_n, b_sums, mask=o_m < T)


@quick_launch
@gluon.jit(do_not_specialize=["T"])
def plain_linear_kernel(
    d_x, d_weight, p_bias, p_squares, p_residual, p_norm, p_shares, p_arrived, p_out, p_rows, p_new_squares,
    T, N, K, stride_residual, eps,
    BM: gl.constexpr, TILE: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    GATED: gl.constexpr, ACT: gl.constexpr, P: gl.constexpr, BP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, SPLITS of K). p_out [T, N] = x W^T + bias, GATED: [T, N / 2], gate's and up's with the
    activation; with p_residual their sum; with p_norm [N] p_rows = p_out * p_norm and p_new_squares [T, tiles of N].
    p_arrived [tiles] is zero before and after."""
    i_n, i_split = gl.program_id(0), gl.program_id(1)
    count = K // (DEPTH * BOXES * SPLITS)
    x_smem = gl.allocate_shared_memory(d_x.dtype, [STAGES * BOXES, BM, DEPTH], d_x.layout)
    w_smem = gl.allocate_shared_memory(d_x.dtype, [STAGES * BOXES, TILE, DEPTH], d_weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_partition, (
                x_smem, w_smem, ready, free, p_squares, p_bias, p_residual, p_norm, p_shares, p_arrived, p_out, p_rows,
                p_new_squares, T, N, K, stride_residual, eps, i_n, i_split, count,
                BM, TILE, BOXES, STAGES, GATED, ACT, P, BP, SPLITS, EARLY,
            )),
            (copy_partition, (
                d_x, d_weight, x_smem, w_smem, ready, free, i_n, i_split * count, count, N // 2,
                BM, TILE, BOXES, STAGES, GATED, EARLY,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
