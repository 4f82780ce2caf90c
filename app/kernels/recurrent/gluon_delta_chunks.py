# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The chunks of gated delta nets by themselves on Hopper GPUs, in Gluon (`DeltaTiles`).

As in `triton_delta_chunks.py` a triangular system of a chunk is inverted by products, of blocks twice as large each
time. The GPU's copy engine (TMA) brings queries and keys into shared memory, where all products read them, and takes
the results away. A product's first factor stays in registers, so of the inverse only second factors go through shared
memory. Norms of queries and keys are the diagonals of their products with themselves. Triton's interpreter cannot run
Gluon: tests run what it means on a CPU (`tests/kernels/gluon_on_cpu.py`), the others need the GPU.
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

from app.kernels.launch import early_launch
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import CHUNK, DeltaGates, DeltaHeads, StateStep, delta_tiles
from app.kernels.recurrent.reference import UNIT_EPS

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # as two versions of Triton name it

L = gl.constexpr(CHUNK)
TILES, FACTORS = gl.constexpr(delta_tiles.TILES), gl.constexpr(delta_tiles.FACTORS)
PANEL = gl.constexpr(64)  # columns that TMA copies at once: 128 bytes, the width of the swizzle
LEVELS = gl.constexpr(CHUNK.bit_length() - 1)
PANEL_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
REGISTERS = 128  # of a thread: four programs a multiprocessor
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def softplus(b_x):
    """The same as `triton_math.softplus`."""
    b_e = gl.exp(gl.minimum(b_x, 20.0))
    b_small = b_e * (1.0 - b_e * (0.5 - b_e * 0.3333333333))
    return gl.where(b_x > 20.0, b_x, gl.where(b_e < 0.01, b_small, gl.log(1.0 + b_e)))


@gluon.jit
def power_of_2(b_x):
    """2^x of fp32 numbers, 0 where that is below 2^-126."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [b_x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def copy_panels(desc, smem, row, column, bar):
    """Begins to copy rows [L, D] from a place of desc into smem, panel by panel."""
    PIECES: gl.constexpr = smem.shape[1] // PANEL
    pieces = smem._reinterpret(smem.dtype, [PIECES, L, PANEL], smem.layout)
    for j in gl.static_range(PIECES):
        tma.async_copy_global_to_shared(desc, [row, column + j * PANEL], bar, pieces.index(j))


@gluon.jit
def zero_behind(smem, num):
    """Rows of smem [L, D] from `num` on become 0: they are another request's, and may be no numbers."""
    D: gl.constexpr = smem.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_l = gl.arange(0, L, layout=gl.SliceLayout(1, ROWS))
    smem.store(gl.where((o_l < num)[:, None], smem.load(ROWS), 0.0).to(smem.dtype))
    fence_async_shared()


@gluon.jit
def inverse(b_negated, negated, blocks, others, o_row, o_column):
    """(1 + system)^-1 of a strictly lower triangular system, fp32 [L, L], negated, of which `negated` holds a copy, as
    `triton_delta_chunks.inverse`; blocks, others: room for the inverse so far, in turn."""
    LAYOUT: gl.constexpr = b_negated.type.layout
    FIRST: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    TYPE: gl.constexpr = blocks.dtype
    o_r, o_c = o_row[:, None], o_column[None, :]
    b_inverse = gl.where(o_r == o_c, 1.0, gl.where(o_r // 2 == o_c // 2, b_negated, 0.0))
    zeros = gl.zeros([L, L], gl.float32, LAYOUT)
    for i in gl.static_range(1, LEVELS):
        b_known = b_inverse.to(TYPE)
        known = blocks if i % 2 == 0 else others
        known.store(b_known)
        fence_async_shared()
        b_half = warpgroup_mma(gl.convert_layout(b_known, FIRST), negated, zeros, use_acc=False)
        # Only what the product has between two neighbours is kept.
        m_both = (o_r // (2 << i) == o_c // (2 << i)) & (o_r // (1 << i) != o_c // (1 << i))
        b_half = gl.convert_layout(gl.where(m_both, b_half, 0.0).to(TYPE), FIRST)
        b_inverse = warpgroup_mma(b_half, known, b_inverse)
    return b_inverse


@quick_launch
@gluon.jit(do_not_specialize=["base", "first_row"])
def delta_chunk_gluon_kernel(
    d_mixed, d_tiles, p_a, p_b, p_a_log, p_dt_bias, p_chunks, p_rows, p_starts, p_factors, base, first_row,
    stride_a, stride_b, scale, rate_scale,
    HK: gl.constexpr, HV: gl.constexpr, DK: gl.constexpr, EPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (HV, N): tiles and factors of a chunk (`DeltaTiles`)."""
    i_h, i_c = gl.program_id(0), gl.program_id(1)
    i_key = i_h // (HV // HK)
    DTYPE: gl.constexpr = d_mixed.dtype
    TYPE: gl.constexpr = gl.float16
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SQUARE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SQUARE)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # all of a chunk's tokens in each warp
    first, end = gl.load(p_chunks + 2 * i_c), gl.load(p_chunks + 2 * i_c + 1)
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    if first < end:
        num = gl.minimum(end - first, L)
        row = gl.load(p_rows + first)
        start = gl.load(p_starts + row)
        part = ((start - base) // L + (row - first_row) + (first - start) // L) * HV + i_h
        first_tile = part * (TILES * L)
        q_smem = gl.allocate_shared_memory(DTYPE, [L, DK], PANEL_LAYOUT)
        k_smem = gl.allocate_shared_memory(DTYPE, [L, DK], PANEL_LAYOUT)
        pairs_smem = q_smem._reinterpret(DTYPE, [2, L, PANEL], PANEL_LAYOUT).index(0)
        negated = q_smem._reinterpret(TYPE, [2, L, PANEL], PANEL_LAYOUT).index(1)
        blocks = gl.allocate_shared_memory(TYPE, [L, L], PANEL_LAYOUT)
        others = gl.allocate_shared_memory(TYPE, [L, L], PANEL_LAYOUT)
        lines = gl.allocate_shared_memory(gl.float32, [2, L], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        fence_async_shared()
        mbarrier.expect(ready, 2 * L * DK * 2)
        copy_panels(d_mixed, k_smem, first, (HK + i_key) * DK, ready)
        copy_panels(d_mixed, q_smem, first, i_key * DK, ready)

        o_line = gl.arange(0, L, layout=LINE)
        m_line = o_line < num
        o_token = (first + o_line).to(gl.int64)
        b_a = gl.load(p_a + o_token * stride_a + i_h, mask=m_line, other=0.0).to(gl.float32)
        b_b = gl.load(p_b + o_token * stride_b + i_h, mask=m_line, other=0.0).to(gl.float32)
        b_log = -gl.exp(gl.load(p_a_log + i_h)) * LOG2_E * softplus(b_a + gl.load(p_dt_bias + i_h))
        b_log = gl.where(m_line, b_log, 0.0)
        b_total = gl.sum(b_log, 0)
        lines.index(0).store(gl.associative_scan(b_log, 0, _sum))
        lines.index(1).store(rate_scale / (1.0 + gl.exp(-b_b)))

        mbarrier.wait(ready, 0)
        if num < L:
            zero_behind(q_smem, num)
            zero_behind(k_smem, num)
        zeros = gl.zeros([L, L], gl.float32, SQUARE)
        b_kk = warpgroup_mma(k_smem, k_smem.permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_qq = warpgroup_mma(q_smem, q_smem.permute((1, 0)), zeros, use_acc=False, is_async=True)
        o_row, o_column = gl.arange(0, L, layout=ROW), gl.arange(0, L, layout=COLUMN)
        m_own = o_row[:, None] == o_column[None, :]
        b_kk, b_qq = warpgroup_mma_wait(0, deps=[b_kk, b_qq])
        b_key_norm = gl.rsqrt(gl.sum(gl.where(m_own, b_kk, 0.0), 1) + EPS)
        b_query_norm = gl.rsqrt(gl.sum(gl.where(m_own, b_qq, 0.0), 1) + EPS) * scale
        b_sum, b_rate = lines.index(0).load(ROW), lines.index(1).load(ROW)
        b_decayed = power_of_2(b_sum)
        b_qk = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zeros, use_acc=False, is_async=True)
        lines.index(0).store(b_sum - gl.log2(b_key_norm))
        # The decay between two tokens, times the norm of the earlier one's key.
        m_seen = o_row[:, None] >= o_column[None, :]
        b_between = gl.where(m_seen, power_of_2(b_sum[:, None] - lines.index(0).load(COLUMN)[None, :]), 0.0)
        b_negated = gl.where(m_own, 0.0, b_kk * b_between * (b_key_norm * -b_rate)[:, None])
        b_qk = warpgroup_mma_wait(0, deps=[b_qk])
        thread_barrier()  # no warp's product reads queries any more
        negated.store(b_negated.to(TYPE))
        pairs_smem.store((b_qk * b_between * b_query_norm[:, None]).to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(d_tiles, [first_tile + L, 0], pairs_smem)
        p_factor = p_factors + part.to(gl.int64) * (FACTORS * L) + o_row
        m_row = o_row < num
        gl.store(p_factor, gl.where(m_row, b_query_norm * b_decayed, 0.0))
        gl.store(p_factor + L, gl.where(m_row, b_key_norm * power_of_2(b_total - b_sum), 0.0))
        gl.store(p_factor + 2 * L, power_of_2(gl.full([L], 0.0, gl.float32, ROW) + b_total))
        gl.store(p_factor + 3 * L, gl.where(m_row, -b_key_norm * b_decayed, 0.0))
        b_inverse = inverse(b_negated, negated, blocks, others, o_row, o_column)
        b_inverse = b_inverse * lines.index(1).load(COLUMN)[None, :]
        inverse_smem = k_smem._reinterpret(DTYPE, [DK // PANEL, L, PANEL], PANEL_LAYOUT).index(0)
        inverse_smem.store(b_inverse.to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(d_tiles, [first_tile, 0], inverse_smem)
        tma.store_wait(0)


def solve_chunks(
    rows: TensorDescriptor, tiles: TensorDescriptor, factors: torch.Tensor, heads: DeltaHeads, gates: DeltaGates,
    step: StateStep,
) -> None:  # fmt: skip
    """Fills tiles and factors; rows: queries, keys and values."""
    delta_chunk_gluon_kernel[(heads.num_values, len(step.chunks))](
        rows, tiles, gates.a, gates.b, gates.a_log, gates.dt_bias, step.chunks, step.row_of_token, step.starts, factors,
        step.num_short * step.short_len, step.num_short, gates.a.stride(0), gates.b.stride(0), heads.key_dim**-0.5,
        gates.rate_scale,
        HK=heads.num_keys, HV=heads.num_values, DK=heads.key_dim, EPS=UNIT_EPS, num_warps=4, maxnreg=REGISTERS,
        **early_launch(factors.device),
    )  # fmt: skip


def descriptor(rows: torch.Tensor) -> TensorDescriptor:
    """A descriptor of 16-bit rows, for copies of L rows and PANEL columns."""
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [L.value, PANEL.value], PANEL_LAYOUT)
