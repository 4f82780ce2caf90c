# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of many rows of int8 with int8 weights for Hopper GPUs, written in Gluon: a warp copies, two groups of four
warps multiply.

As many programs as multiprocessors take tile after tile of the result. The copying warp fills a ring of shared-memory
stages by the GPU's copy engine (TMA) and goes on to the next tile while the groups still finish the last one; each
group has 64 rows of a tile, both of them the same 256 outputs. A barrier (mbarrier) per stage counts the bytes that
arrived, another one the groups that are done with it. Triton's interpreter cannot run Gluon; the tests of this file
need the GPU.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.triton_int8 import Int8Tile, fills
from app.kernels.kernel_table import Kernel
from app.kernels.launch import cdiv, multiprocessors
from app.kernels.quick_launch import quick_launch

ROWS = gl.constexpr(64)  # of a group: what one instruction of four warps takes
GROUPS = gl.constexpr(2)
COLUMNS = gl.constexpr(256)  # outputs of a tile
HALF = gl.constexpr(128)  # outputs of one instruction
DEPTH = gl.constexpr(128)  # inputs of a stage
STAGES = gl.constexpr(4)
SPAN = gl.constexpr(16)  # tiles of rows that share weights, and run together
REGISTERS = 168  # of a thread, before the groups take those of the copying warp
TILE = Int8Tile(ROWS.value * GROUPS.value, COLUMNS.value, DEPTH.value, 4, STAGES.value)
COPIED_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)  # made once for all launches
# A thread's numbers of 64 x 64 results as they lie in memory: 16 bytes of bf16 at a time, of a row of its own warp.
STORE_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)


@gluon.jit
def place_of(i_tile, T, N):
    """(tile of rows, first output) of a tile."""
    tiles_m, tiles_n = gl.cdiv(T, GROUPS * ROWS), gl.cdiv(N, COLUMNS)
    i_span = i_tile // (SPAN * tiles_n)
    height = gl.minimum(tiles_m - i_span * SPAN, SPAN)
    i_in = i_tile % (SPAN * tiles_n)
    return i_span * SPAN + i_in % height, i_in // height * COLUMNS


@gluon.jit
def copy_partition(d_x, d_weight, x_smem, w_smem, ready, free, T, N, num_blocks, num_tiles):
    """One warp: all stages of the program's tiles."""
    step = 0
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        i_m, column = place_of(i_tile, T, N)
        for i_k in range(num_blocks):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), (GROUPS * ROWS + COLUMNS) * DEPTH)
            for i in gl.static_range(GROUPS):
                place = x_smem.index(stage * GROUPS + i)
                row = (i_m * GROUPS + i) * ROWS
                tma.async_copy_global_to_shared(d_x, [row, i_k * DEPTH], ready.index(stage), place)
            for i in gl.static_range(2):
                place = w_smem.index(stage * 2 + i)
                tma.async_copy_global_to_shared(d_weight, [column + i * HALF, i_k * DEPTH], ready.index(stage), place)
            step += 1


@gluon.jit
def sums(step, num_blocks, x_smem, w_smem, ready, free, GROUP: gl.constexpr):
    """Two int32 [64, 128] sums over all inputs. A stage is free once the products of the next one are under way."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    b_left = gl.zeros([ROWS, HALF], gl.int32, LAYOUT)
    b_right = gl.zeros([ROWS, HALF], gl.int32, LAYOUT)
    for i_k in range(num_blocks):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        x_part = x_smem.index(stage * GROUPS + GROUP)
        b_left = warpgroup_mma(x_part, w_smem.index(2 * stage).permute((1, 0)), b_left, is_async=True)
        b_right = warpgroup_mma(x_part, w_smem.index(2 * stage + 1).permute((1, 0)), b_right, is_async=True)
        b_left, b_right = warpgroup_mma_wait(2, deps=[b_left, b_right])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1, pred=i_k > 0)
        step += 1
    b_left, b_right = warpgroup_mma_wait(0, deps=[b_left, b_right])
    mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), count=1)
    return b_left, b_right, step


@gluon.jit
def store_quarter(b_acc, p_bias, p_out, o_row, column, T, N):
    """64 x 64 scaled sums -> p_out."""
    b_out = b_acc
    if p_bias is not None:
        o_n = column + gl.arange(0, 64, layout=gl.SliceLayout(0, b_acc.type.layout))
        b_out = b_out + gl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[None, :]
    b_out = gl.convert_layout(b_out.to(p_out.dtype.element_ty), STORE_LAYOUT)
    o_m = o_row + gl.arange(0, 64, layout=gl.SliceLayout(1, STORE_LAYOUT))
    o_c = column + gl.arange(0, 64, layout=gl.SliceLayout(0, STORE_LAYOUT))
    o_out = o_m[:, None].to(gl.int64) * N + o_c[None, :]
    gl.store(p_out + o_out, b_out, mask=(o_m < T)[:, None] & (o_c < N)[None, :])


@gluon.jit
def store_half(b_acc, b_row, b_scale, p_bias, p_out, o_row, column, T, N):
    """64 x 128 sums times the scales of their rows and columns -> p_out."""
    b_scaled = b_acc.to(gl.float32) * b_row[:, None] * b_scale[None, :]
    b_left, b_right = gl.split(gl.permute(gl.reshape(b_scaled, [ROWS, 2, 64]), (0, 2, 1)))
    store_quarter(b_left, p_bias, p_out, o_row, column, T, N)
    store_quarter(b_right, p_bias, p_out, o_row, column + 64, T, N)


@gluon.jit
def multiply_partition(
    GROUP: gl.constexpr, x_smem, w_smem, ready, free, p_row_scales, p_scales, p_bias, p_out, T, N, num_blocks,
    num_tiles,
):  # fmt: skip
    """Four warps: rows [GROUP * ROWS, (GROUP + 1) * ROWS) of the program's tiles. Scales are loaded before the sums:
    the tensor cores would wait for them else."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    step = 0
    for i_tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        i_m, column = place_of(i_tile, T, N)
        o_row = (i_m * GROUPS + GROUP) * ROWS
        o_m = o_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        o_n = column + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
        b_row = gl.load(p_row_scales + o_m, mask=o_m < T, other=0.0)
        b_scale = gl.load(p_scales + o_n, mask=o_n < N, other=0.0)
        b_more = gl.load(p_scales + HALF + o_n, mask=HALF + o_n < N, other=0.0)
        b_left, b_right, step = sums(step, num_blocks, x_smem, w_smem, ready, free, GROUP)
        store_half(b_left, b_row, b_scale, p_bias, p_out, o_row, column, T, N)
        store_half(b_right, b_row, b_more, p_bias, p_out, o_row, column + HALF, T, N)


@quick_launch
@gluon.jit(do_not_specialize=["T", "num_blocks", "num_tiles"])
def wide_int8_kernel(d_x, d_weight, p_row_scales, p_scales, p_bias, p_out, T, N, num_blocks, num_tiles):
    """Grid (programs,): p_out [T, N] = x [T, K] times weight [N, K], transposed, times both scales, plus a bias."""
    x_smem = gl.allocate_shared_memory(gl.int8, [STAGES * GROUPS, ROWS, DEPTH], d_x.layout)
    w_smem = gl.allocate_shared_memory(gl.int8, [STAGES * 2, HALF, DEPTH], d_weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_partition, (
                0, x_smem, w_smem, ready, free, p_row_scales, p_scales, p_bias, p_out, T, N, num_blocks, num_tiles,
            )),
            (multiply_partition, (
                1, x_smem, w_smem, ready, free, p_row_scales, p_scales, p_bias, p_out, T, N, num_blocks, num_tiles,
            )),
            (copy_partition, (d_x, d_weight, x_smem, w_smem, ready, free, T, N, num_blocks, num_tiles)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def wide_int8_product(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: Int8Tile = TILE,
) -> torch.Tensor:
    """int8 x [T, K in whole blocks] with scales [T, 1] times weight [N, K], transposed: [T, N] of `dtype`. The weight
    has no zero of its activations."""
    assert weight.input_zero is None, "sums of the weight's rows are not taken away here"
    codes = weight.tiles.words.view(torch.int8)
    (num_rows, size), columns = x.shape, len(codes)
    out = torch.empty(num_rows, columns, dtype=dtype, device=x.device)
    d_x = TensorDescriptor(x, [num_rows, size], [size, 1], [ROWS.value, DEPTH.value], COPIED_LAYOUT)
    d_weight = TensorDescriptor(codes, [columns, size], [size, 1], [HALF.value, DEPTH.value], COPIED_LAYOUT)
    num_tiles = cdiv(num_rows, tile.rows) * cdiv(columns, tile.columns)
    wide_int8_kernel[(min(num_tiles, multiprocessors(x.device)),)](
        d_x, d_weight, row_scales, weight.tiles.scales, bias, out, num_rows, columns, size // DEPTH.value, num_tiles,
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


def serves(num_rows: int, weight: Int8Weight) -> Int8Tile | None:
    """`TILE`, if its tiles fill the GPU and the weight has no zero of its activations."""
    return TILE if weight.input_zero is None and fills(num_rows, weight.shape[0]) else None


KERNEL = Kernel(serves, wide_int8_product)
