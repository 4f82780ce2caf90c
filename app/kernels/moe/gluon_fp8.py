# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`triton_fp8`'s products for Hopper GPUs, in Gluon: four warps copy, two groups of four warps multiply.

As many programs as multiprocessors share the tiles. The copying warps fill a ring of stages, each with a block of 128
rows of x, gathered by pair, and two blocks of the weight. The GPU's copy engine (TMA) brings the weight, and rows that
lie in the order of pairs. Copying goes on to the next tile while the groups still finish the last one. A group has 64
rows of a tile. While one scales and adds what the tensor cores gave it, the other multiplies. Triton's interpreter
cannot run Gluon; the tests of this file need the GPU.
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

from app.kernels.gemm.fp8 import LARGEST, LEAST_SCALE
from app.kernels.gemm.stored import BLOCK
from app.kernels.moe.gluon_few import gated
from app.kernels.quick_launch import quick_launch

ROWS = gl.constexpr(64)  # of a group: what one instruction of four warps takes
GROUPS = gl.constexpr(2)
DEPTH = gl.constexpr(BLOCK)  # inputs of a stage, and outputs of a block
COPIERS = gl.constexpr(128)  # threads that copy
REGISTERS, REGS, COPY_REGS = 168, 216, 72  # of a thread: before the groups take those of the copying warps, and after
_LARGEST, _LEAST_SCALE = gl.constexpr(LARGEST), gl.constexpr(LEAST_SCALE)
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32]))
COPIED_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)  # made once for all launches
# A thread's numbers as they lie in memory, 16 bytes at a time, of a row of its own warp: 64 x 64 of two bytes, and
# 64 x 128 of one.
WIDE_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
BYTES_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 64]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)


@gluon.jit
def blocks_of(i_n, n_blocks, GATED: gl.constexpr):
    """The two blocks of a tile's columns. A neighbour behind the last is the last again, and writes what that wrote."""
    if GATED:
        return i_n, n_blocks + i_n
    else:
        return 2 * i_n, gl.minimum(2 * i_n + 1, n_blocks - 1)


@gluon.jit
def rows_of(p_order, o_m, start, count, DIV: gl.constexpr):
    """Rows of x of places o_m of a tile; 0 where there are no pairs."""
    if DIV > 0:
        return gl.load(p_order + start + o_m, mask=o_m < count, other=0) // DIV
    else:
        return gl.where(o_m < count, start + o_m, 0)


@gluon.jit
def tile_at(p_tiles, i, num_tiles, tiles_n, MOST_TILES):
    """(expert, first place in the order, number of rows) of a program's tile; without rows past the last one."""
    p_tile, is_one = p_tiles + i // tiles_n, i < num_tiles
    i_e = gl.load(p_tile, mask=is_one, other=0)
    start = gl.load(p_tile + MOST_TILES, mask=is_one, other=0)
    return i_e, start, gl.load(p_tile + 2 * MOST_TILES, mask=is_one, other=0)


@gluon.jit
def copy_partition(
    p_x, d_x, d_words, p_x_scales, p_order, p_tiles, x_smem, s_smem, w_smem, ready, free, num_tiles, n_blocks,
    num_blocks, stride_scales, MOST_TILES, DIV: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Four warps: all stages of the program's tiles."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    ALL: gl.constexpr = 2 if GATED else 1
    tiles_n = n_blocks if GATED else gl.cdiv(n_blocks, 2)
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, LAYOUT))
    o_scale = gl.arange(0, GROUPS * ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    step = 0
    for i in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        i_tile, i_n = i // tiles_n, i % tiles_n
        i_e = gl.load(p_tiles + i_tile)
        start, count = gl.load(p_tiles + MOST_TILES + i_tile), gl.load(p_tiles + 2 * MOST_TILES + i_tile)
        i_a, i_b = blocks_of(i_n, n_blocks, GATED)
        first = i_e * ALL * n_blocks
        if DIV > 0:
            b_low = rows_of(p_order, o_m, start, count, DIV).to(gl.int64) * (num_blocks * DEPTH)
            b_high = rows_of(p_order, ROWS + o_m, start, count, DIV).to(gl.int64) * (num_blocks * DEPTH)
            p_low, p_high = p_x + b_low[:, None] + o_k[None, :], p_x + b_high[:, None] + o_k[None, :]
            m_low, m_high = (o_m < count)[:, None], (ROWS + o_m < count)[:, None]
        p_scale = p_x_scales + rows_of(p_order, o_scale, start, count, DIV)
        for i_k in range(num_blocks):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), ((step // STAGES) & 1) ^ 1)
            if DIV > 0:
                mbarrier.expect(ready.index(stage), 2 * DEPTH * DEPTH)
            else:
                mbarrier.expect(ready.index(stage), (2 * DEPTH + ROWS) * DEPTH, pred=count <= ROWS)
                mbarrier.expect(ready.index(stage), (2 * DEPTH + GROUPS * ROWS) * DEPTH, pred=count > ROWS)
            column = i_k * DEPTH
            tma.async_copy_global_to_shared(
                d_words, [(first + i_a) * DEPTH, column], ready.index(stage), w_smem.index(2 * stage)
            )
            tma.async_copy_global_to_shared(
                d_words, [(first + i_b) * DEPTH, column], ready.index(stage), w_smem.index(2 * stage + 1)
            )
            if DIV > 0:
                async_copy.async_copy_global_to_shared(x_smem.index(2 * stage), p_low + column, m_low)
                async_copy.async_copy_global_to_shared(x_smem.index(2 * stage + 1), p_high + column, m_high)
            else:
                for j in gl.static_range(GROUPS):
                    tma.async_copy_global_to_shared(
                        d_x,
                        [start + j * ROWS, column],
                        ready.index(stage),
                        x_smem.index(2 * stage + j),
                        pred=count > j * ROWS,
                    )
            async_copy.async_copy_global_to_shared(s_smem.index(stage), p_scale)
            p_scale += stride_scales
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            step += 1


@gluon.jit
def sums(
    step, x_smem, s_smem, w_smem, ready, free, p_scale, i_a, i_b, num_scales, num_blocks, GROUP: gl.constexpr,
    STAGES: gl.constexpr, DIV: gl.constexpr,
):  # fmt: skip
    """Two fp32 [64, 128] over all inputs. The weight's scales come a block ahead."""
    b_a = gl.zeros([ROWS, DEPTH], gl.float32, MMA)
    b_b = gl.zeros([ROWS, DEPTH], gl.float32, MMA)
    b_zero = gl.zeros([ROWS, DEPTH], gl.float32, MMA)
    next_a, next_b = gl.load(p_scale + i_a), gl.load(p_scale + i_b)
    for i_k in range(num_blocks):
        scale_a, scale_b = next_a, next_b
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        if DIV > 0:
            fence_async_shared()  # x was written by threads, not by the copy engine
        x_part = x_smem.index(2 * stage + GROUP)
        b_part = warpgroup_mma(
            x_part, w_smem.index(2 * stage).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )  # fmt: skip
        b_scale = s_smem.index(stage).slice(GROUP * ROWS, ROWS).load(gl.SliceLayout(1, MMA))
        ahead = gl.minimum(i_k + 1, num_blocks - 1) * num_scales
        # Behind the fence, which would wait for them.
        next_a, next_b = gl.load(p_scale + ahead + i_a), gl.load(p_scale + ahead + i_b)
        b_part = warpgroup_mma_wait(0, deps=[b_part])
        b_a += b_part * (b_scale * scale_a)[:, None]
        b_part = warpgroup_mma(
            x_part, w_smem.index(2 * stage + 1).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )  # fmt: skip
        b_part = warpgroup_mma_wait(0, deps=[b_part])
        mbarrier.arrive(free.index(stage), count=1)
        b_b += b_part * (b_scale * scale_b)[:, None]
        step += 1
    return b_a, b_b


@gluon.jit
def store_rounded(b_h, p_out, p_out_scales, start, count, i_n, N, num_pairs, GROUP: gl.constexpr):
    """A block of activated rows as e4m3, its halves in turn, and its scales."""
    b_scale = gl.maximum(gl.max(gl.maximum(b_h, -b_h), 1) / _LARGEST, _LEAST_SCALE)
    o_m = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    gl.store(p_out_scales + i_n.to(gl.int64) * num_pairs + start + o_m, b_scale, mask=o_m < count)
    b_h = b_h * (1.0 / b_scale)[:, None]
    b_h = gl.minimum(gl.maximum(b_h, -_LARGEST), _LARGEST)
    b_bytes = gl.reshape(gl.permute(gl.reshape(b_h, [ROWS, 2, DEPTH // 2]), (0, 2, 1)), [ROWS, DEPTH])
    b_bytes = gl.convert_layout(b_bytes.to(gl.float8e4nv), BYTES_LAYOUT)
    o_m = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, BYTES_LAYOUT))
    o_c = i_n * DEPTH + gl.arange(0, DEPTH, layout=gl.SliceLayout(0, BYTES_LAYOUT))
    gl.store(p_out + (start + o_m).to(gl.int64)[:, None] * N + o_c[None, :], b_bytes, mask=(o_m < count)[:, None])


@gluon.jit
def store_half(b_acc, p_out, p_rows, m_m, column):
    """64 x 64 sums."""
    b_out = gl.convert_layout(b_acc.to(p_out.dtype.element_ty), WIDE_LAYOUT)
    o_c = column + gl.arange(0, 64, layout=gl.SliceLayout(0, WIDE_LAYOUT))
    gl.store(p_rows[:, None] + o_c[None, :], b_out, mask=m_m[:, None])


@gluon.jit
def store_block(b_acc, p_out, b_pair, m_m, i_block, N):
    """64 x 128 sums to the rows of their pairs."""
    p_rows = p_out + b_pair.to(gl.int64) * N
    b_left, b_right = gl.split(gl.permute(gl.reshape(b_acc, [ROWS, 2, 64]), (0, 2, 1)))
    store_half(b_left, p_out, p_rows, m_m, i_block * DEPTH)
    store_half(b_right, p_out, p_rows, m_m, i_block * DEPTH + 64)


@gluon.jit
def multiply_partition(
    GROUP: gl.constexpr, x_smem, s_smem, w_smem, ready, free, p_scales, p_bias, p_weights, p_order, p_tiles, p_out,
    p_out_scales, num_tiles, n_blocks, num_blocks, num_scales, limit, alpha, up_offset, MOST_TILES, num_pairs,
    GATED: gl.constexpr, HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr, DIV: gl.constexpr,
):  # fmt: skip
    """Four warps: rows [GROUP * ROWS, (GROUP + 1) * ROWS) of the program's tiles. What a tile's end and the next tile
    need is loaded before the sums: the tensor cores would wait for it else."""
    ALL: gl.constexpr = 2 if GATED else 1
    N = n_blocks * DEPTH
    tiles_n = n_blocks if GATED else gl.cdiv(n_blocks, 2)
    o_m = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE_LAYOUT))
    step, programs = 0, gl.num_programs(0)
    next_e, next_start, next_count = tile_at(p_tiles, gl.program_id(0), num_tiles, tiles_n, MOST_TILES)
    for i in range(gl.program_id(0), num_tiles, programs):
        i_n = i % tiles_n
        i_e, start, count = next_e.to(gl.int64), next_start, next_count
        next_e, next_start, next_count = tile_at(p_tiles, i + programs, num_tiles, tiles_n, MOST_TILES)
        if count > GROUP * ROWS:
            m_m = o_m < count
            b_pair = gl.load(p_order + start + o_m, mask=m_m, other=0)
            i_a, i_b = blocks_of(i_n, n_blocks, GATED)
            b_a, b_b = sums(
                step, x_smem, s_smem, w_smem, ready, free, p_scales + i_e * num_blocks * num_scales, i_a, i_b,
                num_scales, num_blocks, GROUP, STAGES, DIV,
            )  # fmt: skip
            if p_weights is not None:
                b_weight = gl.load(p_weights + b_pair, mask=m_m, other=0.0)
                b_weight = gl.convert_layout(b_weight, gl.SliceLayout(1, MMA))[:, None]
                b_a = b_a * b_weight
                b_b = b_b * b_weight
            if p_bias is not None:
                o_bias = i_e * ALL * N + gl.arange(0, DEPTH, layout=gl.SliceLayout(0, MMA))
                b_a = b_a + gl.load(p_bias + o_bias + i_a * DEPTH).to(gl.float32)[None, :]
                b_b = b_b + gl.load(p_bias + o_bias + i_b * DEPTH).to(gl.float32)[None, :]
            if GATED:
                b_h = gated(b_a, b_b, limit, alpha, up_offset, HAS_LIMIT)
                store_rounded(b_h, p_out, p_out_scales, start, count, i_n, N, num_pairs, GROUP)
            else:
                store_block(b_a, p_out, b_pair, m_m, i_a, N)
                store_block(b_b, p_out, b_pair, m_m, i_b, N)
        else:
            for i_k in range(num_blocks):
                at = step + i_k
                mbarrier.wait(ready.index(at % STAGES), (at // STAGES) & 1)
                mbarrier.arrive(free.index(at % STAGES), count=1)
        step += num_blocks


@quick_launch
@gluon.jit(do_not_specialize=["MOST_TILES", "stride_scales", "num_pairs"])
def wide_fp8_kernel(
    p_x, d_x, d_words, p_x_scales, p_scales, p_bias, p_weights, p_order, p_tiles, p_num_tiles, p_out, p_out_scales,
    N, num_blocks, stride_scales, num_scales, limit, alpha, up_offset, MOST_TILES, num_pairs,
    DIV: gl.constexpr, GATED: gl.constexpr, HAS_LIMIT: gl.constexpr, STAGES: gl.constexpr, REGS: gl.constexpr,
    COPY_REGS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): the same as `triton_fp8.fp8_product_kernel` with tiles of 128 rows; SiLU."""
    BYTES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * GROUPS, ROWS, DEPTH], BYTES)
    s_smem = gl.allocate_shared_memory(gl.float32, [STAGES, GROUPS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, DEPTH, DEPTH], BYTES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=COPIERS + 1)
        mbarrier.init(free.index(i), count=GROUPS)
    fence_async_shared()
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    n_blocks = N // DEPTH
    num_tiles = gl.load(p_num_tiles) * (n_blocks if GATED else gl.cdiv(n_blocks, 2))
    gl.warp_specialize(
        [
            (multiply_partition, (
                0, x_smem, s_smem, w_smem, ready, free, p_scales, p_bias, p_weights, p_order, p_tiles, p_out,
                p_out_scales, num_tiles, n_blocks, num_blocks, num_scales, limit, alpha, up_offset, MOST_TILES,
                num_pairs, GATED, HAS_LIMIT, STAGES, DIV,
            )),
            (multiply_partition, (
                1, x_smem, s_smem, w_smem, ready, free, p_scales, p_bias, p_weights, p_order, p_tiles, p_out,
                p_out_scales, num_tiles, n_blocks, num_blocks, num_scales, limit, alpha, up_offset, MOST_TILES,
                num_pairs, GATED, HAS_LIMIT, STAGES, DIV,
            )),
            (copy_partition, (
                p_x, d_x, d_words, p_x_scales, p_order, p_tiles, x_smem, s_smem, w_smem, ready, free, num_tiles,
                n_blocks, num_blocks, stride_scales, MOST_TILES, DIV, GATED, STAGES,
            )),
        ],
        [4, 4],
        [REGS, COPY_REGS],
    )  # fmt: skip


def launch_wide(programs: int, rows: torch.Tensor, words: torch.Tensor, stages: int, given: dict[str, Any]) -> None:
    """e4m3 rows [T, K] and words [E, N, K]; the rest as `triton_fp8` gives it to its own kernel."""
    flat = words.flatten(0, 1)
    d_words = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [DEPTH.value, DEPTH.value], COPIED_LAYOUT)
    d_x = None
    if given["DIV"] == 0:
        d_x = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [ROWS.value, DEPTH.value], COPIED_LAYOUT)
    wide_fp8_kernel[(programs,)](
        p_x=rows, d_x=d_x, d_words=d_words, STAGES=stages, REGS=REGS, COPY_REGS=COPY_REGS, num_warps=4,
        maxnreg=REGISTERS, **given,
    )  # fmt: skip
