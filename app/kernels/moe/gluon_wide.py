# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Grouped products of many rows of 16 bits for Hopper GPUs, in Gluon: four warps copy, two groups of four warps
multiply.

As many programs as multiprocessors share the tiles, of 128 sorted pairs times 256 rows of an expert's weight: gate's
and up's of the same 128 columns, or 256 of down's. The copying warps fill a ring of stages, each with 64 inputs: rows
of x gathered by pair, and the weight by the GPU's copy engine (TMA), which also brings rows that lie in the order of
pairs. Copying goes on to the next tile while the groups still finish the last one. A group has 64 rows of a tile.
Triton's interpreter cannot run Gluon; the tests of this file need the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.launch import cdiv, multiprocessors
from app.kernels.moe.gluon_few import gated
from app.kernels.moe.gluon_fp8 import WIDE_LAYOUT, rows_of, tile_at
from app.kernels.quick_launch import quick_launch

ROWS = gl.constexpr(64)  # of a group: what one instruction of four warps takes
GROUPS = gl.constexpr(2)
COLUMNS = gl.constexpr(256)  # rows of the weight in a tile
HALF = gl.constexpr(128)
DEPTH = gl.constexpr(64)  # inputs of a stage: 128 bytes of a row
STAGES = gl.constexpr(4)
COPIERS = gl.constexpr(128)  # threads that copy
REGISTERS, REGS, COPY_REGS = 168, 216, 72  # of a thread: before the groups take those of the copying warps, and after
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


@gluon.jit
def copy_partition(
    p_x, d_x, d_weight, p_order, p_tiles, x_smem, w_smem, ready, free, num_tiles, tiles_n, num_blocks, N, stride_x,
    MOST_TILES, DIV: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Four warps: all stages of the program's tiles. What a tile's copies need is loaded a tile before."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    o_k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, COPY))
    w_halves = w_smem._reinterpret(w_smem.dtype, [STAGES * 2, HALF, DEPTH], d_weight.layout)
    step, programs = 0, gl.num_programs(0)
    i_e, start, count = tile_at(p_tiles, gl.program_id(0), num_tiles, tiles_n, MOST_TILES)
    next_e, next_start, next_count = tile_at(p_tiles, gl.program_id(0) + programs, num_tiles, tiles_n, MOST_TILES)
    b_low, b_high = rows_of(p_order, o_m, start, count, DIV), rows_of(p_order, ROWS + o_m, start, count, DIV)
    for i in range(gl.program_id(0), num_tiles, programs):
        i_n = i % tiles_n
        first = i_e * N + i_n * COLUMNS
        second = first + HALF
        if GATED:
            first = i_e * 2 * N + i_n * HALF
            second = first + N
        if DIV > 0:
            p_low = p_x + (b_low.to(gl.int64) * stride_x)[:, None] + o_k[None, :]
            p_high = p_x + (b_high.to(gl.int64) * stride_x)[:, None] + o_k[None, :]
            m_low, m_high = (o_m < count)[:, None], (ROWS + o_m < count)[:, None]
            b_low = rows_of(p_order, o_m, next_start, next_count, DIV)
            b_high = rows_of(p_order, ROWS + o_m, next_start, next_count, DIV)
        here, here_count = start, count
        i_e, start, count = next_e, next_start, next_count
        next_e, next_start, next_count = tile_at(p_tiles, i + 2 * programs, num_tiles, tiles_n, MOST_TILES)
        for i_k in range(num_blocks):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            if DIV > 0:
                mbarrier.expect(ready.index(stage), COLUMNS * DEPTH * 2)
            else:
                mbarrier.expect(ready.index(stage), (COLUMNS + ROWS) * DEPTH * 2, pred=here_count <= ROWS)
                mbarrier.expect(ready.index(stage), (COLUMNS + GROUPS * ROWS) * DEPTH * 2, pred=here_count > ROWS)
            column = i_k * DEPTH
            tma.async_copy_global_to_shared(d_weight, [first, column], ready.index(stage), w_halves.index(2 * stage))
            tma.async_copy_global_to_shared(
                d_weight, [second, column], ready.index(stage), w_halves.index(2 * stage + 1)
            )
            if DIV > 0:
                async_copy.async_copy_global_to_shared(x_smem.index(2 * stage), p_low + column, m_low)
                async_copy.async_copy_global_to_shared(x_smem.index(2 * stage + 1), p_high + column, m_high)
            else:
                for j in gl.static_range(GROUPS):
                    tma.async_copy_global_to_shared(
                        d_x,
                        [here + j * ROWS, column],
                        ready.index(stage),
                        x_smem.index(2 * stage + j),
                        pred=here_count > j * ROWS,
                    )
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            step += 1


@gluon.jit
def stage_product(step, b_acc, x_smem, w_smem, ready, GROUP: gl.constexpr, DIV: gl.constexpr, USE_ACC: gl.constexpr):
    """Starts the product of a stage: fp32 [64, 256]."""
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
    if DIV > 0:
        fence_async_shared()  # x was written by threads, not by the copy engine
    x_part = x_smem.index(2 * stage + GROUP)
    return warpgroup_mma(x_part, w_smem.index(stage).permute((1, 0)), b_acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def sums(step, b_acc, num_blocks, x_smem, w_smem, ready, free, GROUP: gl.constexpr, DIV: gl.constexpr):
    """fp32 [64, 256] over all inputs, of which the first stage's are under way. A stage is free once the product of the
    next one is."""
    b_acc = warpgroup_mma_wait(1, deps=[b_acc])  # waits for nothing yet, and makes it what the loop carries
    for i_k in range(1, num_blocks):
        b_acc = stage_product(step + i_k, b_acc, x_smem, w_smem, ready, GROUP, DIV, True)
        b_acc = warpgroup_mma_wait(1, deps=[b_acc])
        mbarrier.arrive(free.index((step + i_k - 1) % STAGES), count=1)
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])
    mbarrier.arrive(free.index((step + num_blocks - 1) % STAGES), count=1)
    return b_acc


@gluon.jit
def halves(b_acc):
    """The left and the right half of a tile's columns."""
    return gl.split(gl.permute(gl.reshape(b_acc, [b_acc.shape[0], 2, b_acc.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def weighed(b_acc, p_weights, p_bias, b_pair_rows, m_rows, first, column, N):
    """Sums [64, 128] of columns from `column` on times the weights of their pairs, plus a bias, whose column 0 is at
    `first`."""
    if p_weights is not None:
        m_m = gl.convert_layout(m_rows, gl.SliceLayout(1, b_acc.type.layout))
        b_pair = gl.convert_layout(b_pair_rows, gl.SliceLayout(1, b_acc.type.layout))
        b_acc = b_acc * gl.load(p_weights + b_pair, mask=m_m, other=0.0)[:, None]
    if p_bias is not None:
        o_c = column + gl.arange(0, b_acc.shape[1], layout=gl.SliceLayout(0, b_acc.type.layout))
        b_bias = gl.load(p_bias + first + o_c, mask=o_c < N, other=0.0)
        b_acc = b_acc + b_bias.to(gl.float32)[None, :]
    return b_acc


@gluon.jit
def store_rows(b_out, p_rows, m_m, column, N):
    """64 x 128 numbers to rows of the result, 64 columns at a time."""
    b_left, b_right = halves(b_out)
    for i in gl.static_range(2):
        b_half = gl.convert_layout((b_left if i == 0 else b_right).to(p_rows.dtype.element_ty), WIDE_LAYOUT)
        o_c = column + i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, WIDE_LAYOUT))
        gl.store(p_rows[:, None] + o_c[None, :], b_half, mask=m_m[:, None] & (o_c < N)[None, :])


@gluon.jit
def multiply_partition(
    GROUP: gl.constexpr, x_smem, w_smem, ready, free, p_bias, p_weights, p_order, p_tiles, p_out, num_tiles, tiles_n,
    num_blocks, N, limit, alpha, up_offset, MOST_TILES, GATED: gl.constexpr, HAS_LIMIT: gl.constexpr,
    DIV: gl.constexpr,
):  # fmt: skip
    """Four warps: rows [GROUP * ROWS, (GROUP + 1) * ROWS) of the program's tiles. What a tile's end and the next tile
    need is loaded while the first product runs: the tensor cores wait for nothing, nor does the first stage's fence."""
    o_m = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE_LAYOUT))
    step, programs = 0, gl.num_programs(0)
    b_zero = gl.zeros([ROWS, COLUMNS], gl.float32, MMA)
    i_e, start, count = tile_at(p_tiles, gl.program_id(0), num_tiles, tiles_n, MOST_TILES)
    for i in range(gl.program_id(0), num_tiles, programs):
        i_n = i % tiles_n
        next_e, next_start, next_count = i_e, start, count
        if count > GROUP * ROWS:
            b_acc = stage_product(step, b_zero, x_smem, w_smem, ready, GROUP, DIV, False)
            next_e, next_start, next_count = tile_at(p_tiles, i + programs, num_tiles, tiles_n, MOST_TILES)
            m_m = o_m < count
            b_pair = gl.load(p_order + start + o_m, mask=m_m, other=0)
            b_acc = sums(step, b_acc, num_blocks, x_smem, w_smem, ready, free, GROUP, DIV)
            b_left, b_right = halves(b_acc)
            if GATED:
                column = i_n * HALF
                b_left = weighed(b_left, p_weights, p_bias, b_pair, m_m, i_e * 2 * N, column, N)
                b_right = weighed(b_right, p_weights, p_bias, b_pair, m_m, i_e * 2 * N + N, column, N)
                b_out = gated(b_left, b_right, limit, alpha, up_offset, HAS_LIMIT)
                store_rows(b_out, p_out + (start + o_m).to(gl.int64) * N, m_m, column, N)
            else:
                column = i_n * COLUMNS
                p_rows = p_out + b_pair.to(gl.int64) * N
                b_left = weighed(b_left, p_weights, p_bias, b_pair, m_m, i_e * N, column, N)
                store_rows(b_left, p_rows, m_m, column, N)
                b_right = weighed(b_right, p_weights, p_bias, b_pair, m_m, i_e * N, column + HALF, N)
                store_rows(b_right, p_rows, m_m, column + HALF, N)
        else:
            next_e, next_start, next_count = tile_at(p_tiles, i + programs, num_tiles, tiles_n, MOST_TILES)
            for i_k in range(num_blocks):
                at = step + i_k
                mbarrier.wait(ready.index(at % STAGES), (at // STAGES) & 1)
                mbarrier.arrive(free.index(at % STAGES), count=1)
        i_e, start, count = next_e, next_start, next_count
        step += num_blocks


@quick_launch
@gluon.jit(do_not_specialize=["MOST_TILES"])
def wide_product_kernel(
    p_x, d_x, d_weight, p_bias, p_weights, p_order, p_tiles, p_num_tiles, p_out, N, num_blocks, stride_x, limit, alpha,
    up_offset, MOST_TILES, DIV: gl.constexpr, GATED: gl.constexpr, HAS_LIMIT: gl.constexpr, REGS: gl.constexpr,
    COPY_REGS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): the same as `triton_grouped.sorted_product_kernel` with tiles of 128 rows; x has a row for DIV
    pairs, or, 0, one for each in their order. GATED, by SiLU: p_out is in the order of pairs, else in that of ids."""
    x_smem = gl.allocate_shared_memory(d_weight.dtype, [STAGES * GROUPS, ROWS, DEPTH], d_weight.layout)
    w_smem = gl.allocate_shared_memory(d_weight.dtype, [STAGES, COLUMNS, DEPTH], d_weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=COPIERS + 1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence_async_shared()
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    tiles_n = gl.cdiv(N, HALF) if GATED else gl.cdiv(N, COLUMNS)
    num_tiles = gl.load(p_num_tiles) * tiles_n
    gl.warp_specialize(
        [
            (multiply_partition, (
                0, x_smem, w_smem, ready, free, p_bias, p_weights, p_order, p_tiles, p_out, num_tiles, tiles_n,
                num_blocks, N, limit, alpha, up_offset, MOST_TILES, GATED, HAS_LIMIT, DIV,
            )),
            (multiply_partition, (
                1, x_smem, w_smem, ready, free, p_bias, p_weights, p_order, p_tiles, p_out, num_tiles, tiles_n,
                num_blocks, N, limit, alpha, up_offset, MOST_TILES, GATED, HAS_LIMIT, DIV,
            )),
            (copy_partition, (
                p_x, d_x, d_weight, p_order, p_tiles, x_smem, w_smem, ready, free, num_tiles, tiles_n, num_blocks, N,
                stride_x, MOST_TILES, DIV, GATED,
            )),
        ],
        [4, 4],
        [REGS, COPY_REGS],
    )  # fmt: skip


def serves(rows: torch.Tensor, size: int, columns: int) -> bool:
    """True if the copies suit for rows [T, size] and a result of so many columns: 16 bits, whole stages and vectors."""
    is_half = rows.dtype in (torch.bfloat16, torch.float16)
    return is_half and size % DEPTH.value == 0 and columns % 8 == 0 and rows.stride(0) % 8 == 0


def wide_product(
    x: torch.Tensor, weight: torch.Tensor, most_tiles: int, out: torch.Tensor, given: dict[str, Any]
) -> None:
    """x [T, K], or, with DIV 0, rows in the order of pairs, times weight [E, N or 2 N, K] into `out`; `given` are the
    kernel's other arguments."""
    columns, size = out.shape[1], weight.shape[2]
    assert serves(x, size, columns), (x.dtype, x.stride(), size, columns)
    flat = weight.flatten(0, 1)
    d_weight = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [HALF.value, DEPTH.value], LAYOUT.value)
    d_x = None
    if given["DIV"] == 0:
        d_x = TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS.value, DEPTH.value], LAYOUT.value)
    tiles_n = cdiv(columns, HALF.value if given["GATED"] else COLUMNS.value)
    wide_product_kernel[(min(most_tiles * tiles_n, multiprocessors(x.device)),)](
        p_x=x, d_x=d_x, d_weight=d_weight, p_out=out, N=columns, num_blocks=size // DEPTH.value, stride_x=x.stride(0),
        MOST_TILES=most_tiles, REGS=REGS, COPY_REGS=COPY_REGS, num_warps=4, maxnreg=REGISTERS, **given,
    )  # fmt: skip
