# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The scan of gated delta nets from chunk to chunk on Hopper GPUs, in Gluon.

A program takes 64 values of a head through the chunks of a request, its state in the registers of four warps, where it
is the first factor of the tensor cores' asynchronous products. One more warp copies what a chunk needs by the GPU's
copy engine (TMA) into a ring of stages, some chunks ahead: so a chunk waits for the one before it and for nothing else.
While the tensor cores multiply, what the chunk before gave is stored. Triton's interpreter cannot run Gluon: tests run
what it means on a CPU (`tests/kernels/gluon_on_cpu.py`), the others need the GPU.
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
from app.kernels.recurrent import DeltaHeads, StateStep
from app.kernels.recurrent.gluon_delta_chunks import FACTORS, PANEL, PANEL_LAYOUT, TILES, L, zero_behind

VALUES = gl.constexpr(64)  # of a head that a program takes: what one instruction of four warps takes
STAGES = gl.constexpr(3)
FACTOR_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


@gluon.jit
def copy_partition(
    d_mixed, d_tiles, d_factors, q_smem, k_smem, v_smem, inverse_smem, pairs_smem, factor_smem, ready, later, free,
    first, number, count, i_h, i_key, i_v, HK: gl.constexpr, HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """One warp: all stages."""
    PIECES: gl.constexpr = DK // PANEL
    PIECE: gl.constexpr = [STAGES * PIECES, L, PANEL]
    q_pieces = q_smem._reinterpret(d_mixed.dtype, PIECE, d_mixed.layout)
    k_pieces = k_smem._reinterpret(d_mixed.dtype, PIECE, d_mixed.layout)
    for i in range(count):
        stage = i % STAGES
        part = (number + i) * HV + i_h
        row = first + i * L
        bar, last = ready.index(stage), later.index(stage)
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, (2 * L * DK + L * VALUES) * 2 + FACTORS * L * 4)
        mbarrier.expect(last, TILES * L * L * 2)
        for j in gl.static_range(PIECES):
            tma.async_copy_global_to_shared(
                d_mixed, [row, (HK + i_key) * DK + j * PANEL], bar, k_pieces.index(stage * PIECES + j)
            )
        tma.async_copy_global_to_shared(d_factors, [part * (FACTORS * L)], bar, factor_smem.index(stage))
        tma.async_copy_global_to_shared(d_mixed, [row, 2 * HK * DK + i_h * DV + i_v * VALUES], bar, v_smem.index(stage))
        for j in gl.static_range(PIECES):
            tma.async_copy_global_to_shared(
                d_mixed, [row, i_key * DK + j * PANEL], bar, q_pieces.index(stage * PIECES + j)
            )
        tma.async_copy_global_to_shared(d_tiles, [part * (TILES * L), 0], last, inverse_smem.index(stage))
        tma.async_copy_global_to_shared(d_tiles, [part * (TILES * L) + L, 0], last, pairs_smem.index(stage))


@gluon.jit
def store_tokens(b_out, out_smem, p_rows, num, HV: gl.constexpr, DV: gl.constexpr):
    """Stores b_out [VALUES, L] as the first `num` tokens' rows, 16 bytes a thread."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    out_smem.permute((1, 0)).store(b_out)
    o_l = gl.arange(0, L, layout=gl.SliceLayout(1, WIDE))
    o_v = gl.arange(0, VALUES, layout=gl.SliceLayout(0, WIDE))
    gl.store(p_rows + o_l[:, None] * (HV * DV) + o_v[None, :], out_smem.load(WIDE), mask=(o_l < num)[:, None])


@gluon.jit
def through_chunk(
    i, b_left, b_right, b_first, b_second, b_out, q_panels, k_panels, v_smem, inverse_smem, pairs_smem, factors,
    out_smem, ready, later, free, p_before, num_before, HV: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """The state behind chunk i, its left and right half [VALUES, PANEL] of keys, and what it gives [VALUES, L]. The
    tensor cores work in the order of the calls: in two gaps, when the next product's first factor is being made of the
    last one's result, they multiply with queries. Meanwhile what the chunk before gave (b_out) is stored, as the rows
    of num_before tokens from p_before on."""
    DTYPE: gl.constexpr = v_smem.dtype
    LAYOUT: gl.constexpr = b_left.type.layout
    FIRST: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    stage = i % STAGES
    k_left, k_right = k_panels.index(2 * stage), k_panels.index(2 * stage + 1)
    zeros = gl.zeros([VALUES, L], gl.float32, LAYOUT)
    b_known = warpgroup_mma(b_first, k_left.permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_known = warpgroup_mma(b_second, k_right.permute((1, 0)), b_known, is_async=True)
    b_o = warpgroup_mma(b_first, q_panels.index(2 * stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    store_tokens(b_out, out_smem, p_before, num_before, HV, DV)
    b_v = v_smem.index(stage).permute((1, 0)).load(LAYOUT)
    b_key_factor = factors.index(stage * FACTORS + 3).load(COLUMN)
    b_change_factor = factors.index(stage * FACTORS + 1).load(COLUMN)
    b_kept = factors.index(stage * FACTORS + 2).load(gl.SliceLayout(1, LAYOUT))
    b_known = warpgroup_mma_wait(1, deps=[b_known])
    # This ends a basic block: the assembler would take what follows for a user of all products.
    mbarrier.wait(later.index(stage), (i // STAGES) & 1)
    b_known = gl.convert_layout((b_v.to(gl.float32) + b_known * b_key_factor[None, :]).to(DTYPE), FIRST)
    b_change = warpgroup_mma(b_known, inverse_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    b_o = warpgroup_mma(b_second, q_panels.index(2 * stage + 1).permute((1, 0)), b_o, is_async=True)
    b_query_factor = factors.index(stage * FACTORS).load(COLUMN)
    b_change, b_known, b_first = warpgroup_mma_wait(1, deps=[b_change, b_known, b_first])
    mbarrier.wait(ready.index(stage), (i // STAGES) & 1)  # ends another one
    b_entered = gl.convert_layout((b_change * b_change_factor[None, :]).to(DTYPE), FIRST)
    b_left = b_left * b_kept[:, None]
    b_left = warpgroup_mma(b_entered, k_left, b_left, is_async=True)
    b_right = b_right * b_kept[:, None]
    b_right = warpgroup_mma(b_entered, k_right, b_right, is_async=True)
    b_changed = gl.convert_layout(b_change.to(DTYPE), FIRST)
    b_o, b_second = warpgroup_mma_wait(2, deps=[b_o, b_second])
    b_o = b_o * b_query_factor[None, :]
    b_o = warpgroup_mma(b_changed, pairs_smem.index(stage).permute((1, 0)), b_o, is_async=True)
    b_left, b_right, b_entered = warpgroup_mma_wait(1, deps=[b_left, b_right, b_entered])
    b_first = gl.convert_layout(b_left.to(DTYPE), FIRST)
    b_second = gl.convert_layout(b_right.to(DTYPE), FIRST)
    b_o, b_changed = warpgroup_mma_wait(0, deps=[b_o, b_changed])
    mbarrier.arrive(free.index(stage), count=1)
    return b_left, b_right, b_first, b_second, b_o.to(DTYPE)


@gluon.jit
def scan_partition(
    q_smem, k_smem, v_smem, inverse_smem, pairs_smem, factor_smem, out_smem, ready, later, free, p_states, p_out,
    source, target, begin, length, i_h, i_v, HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr,
):  # fmt: skip
    """Four warps: the state, chunk after chunk. begin: of the request, among the tokens of p_out."""
    DTYPE: gl.constexpr = v_smem.dtype
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    PANELS: gl.constexpr = [2 * STAGES, L, PANEL]
    q_panels = q_smem._reinterpret(DTYPE, PANELS, PANEL_LAYOUT)
    k_panels = k_smem._reinterpret(DTYPE, PANELS, PANEL_LAYOUT)
    factors = factor_smem._reinterpret(gl.float32, [STAGES * FACTORS, L], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    o_v = i_v * VALUES + gl.arange(0, VALUES, layout=gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, PANEL, layout=gl.SliceLayout(0, LAYOUT))
    o_state = (i_h * DV + o_v)[:, None] * DK + o_k[None, :]
    p_from = p_states + source.to(gl.int64) * (HV * DV * DK)
    no_state = gl.zeros([VALUES, PANEL], gl.int32, LAYOUT)
    b_left = gl.load(p_from + o_state, mask=(no_state + source) >= 0, other=0.0).to(gl.float32)
    b_right = gl.load(p_from + PANEL + o_state, mask=(no_state + source) >= 0, other=0.0).to(gl.float32)
    FIRST: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    b_first = gl.convert_layout(b_left.to(DTYPE), FIRST)
    b_second = gl.convert_layout(b_right.to(DTYPE), FIRST)
    p_rows = p_out + begin.to(gl.int64) * (HV * DV) + (i_h * DV + i_v * VALUES)
    CHUNK_ROWS: gl.constexpr = L * HV * DV
    b_out = gl.zeros([VALUES, L], DTYPE, LAYOUT)
    num_whole = length // L
    num_before = 0
    for i in range(num_whole):
        mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)
        b_left, b_right, b_first, b_second, b_out = through_chunk(
            i, b_left, b_right, b_first, b_second, b_out, q_panels, k_panels, v_smem, inverse_smem, pairs_smem, factors,
            out_smem, ready, later, free, p_rows - CHUNK_ROWS, num_before, HV, DV,
        )  # fmt: skip
        p_rows += CHUNK_ROWS
        num_before = L
    left = length % L
    if left > 0:
        stage = num_whole % STAGES
        mbarrier.wait(ready.index(stage), (num_whole // STAGES) & 1)
        zero_behind(k_panels.index(2 * stage), left)
        zero_behind(k_panels.index(2 * stage + 1), left)
        zero_behind(v_smem.index(stage), left)
        b_left, b_right, b_first, b_second, b_out = through_chunk(
            num_whole, b_left, b_right, b_first, b_second, b_out, q_panels, k_panels, v_smem, inverse_smem, pairs_smem,
            factors, out_smem, ready, later, free, p_rows - CHUNK_ROWS, num_before, HV, DV,
        )  # fmt: skip
        p_rows += CHUNK_ROWS
        num_before = left
    store_tokens(b_out, out_smem, p_rows - CHUNK_ROWS, num_before, HV, DV)
    p_to = p_states + target.to(gl.int64) * (HV * DV * DK)
    gl.store(p_to + o_state, b_left.to(p_states.dtype.element_ty), mask=(no_state + target) >= 0)
    gl.store(p_to + PANEL + o_state, b_right.to(p_states.dtype.element_ty), mask=(no_state + target) >= 0)


@quick_launch
@gluon.jit(do_not_specialize=["base", "first_row"])
def delta_scan_gluon_kernel(
    d_mixed, d_tiles, d_factors, p_states, p_starts, p_sources, p_slots, p_out, base, first_row,
    HK: gl.constexpr, HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (DV / VALUES, HV, rows): from chunk to chunk of a request, from the first such row on."""
    i_v, i_h, i_row = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_r = first_row + i_row
    source, target = gl.load(p_sources + i_r), gl.load(p_slots + i_r)
    first = gl.load(p_starts + i_r)
    length = gl.load(p_starts + i_r + 1) - first
    count = gl.cdiv(length, L)
    q_smem = gl.allocate_shared_memory(d_mixed.dtype, [STAGES, L, DK], d_mixed.layout)
    k_smem = gl.allocate_shared_memory(d_mixed.dtype, [STAGES, L, DK], d_mixed.layout)
    v_smem = gl.allocate_shared_memory(d_mixed.dtype, [STAGES, L, VALUES], d_mixed.layout)
    inverse_smem = gl.allocate_shared_memory(d_mixed.dtype, [STAGES, L, L], d_mixed.layout)
    pairs_smem = gl.allocate_shared_memory(d_mixed.dtype, [STAGES, L, L], d_mixed.layout)
    out_smem = gl.allocate_shared_memory(d_mixed.dtype, [L, VALUES], d_mixed.layout)
    factor_smem = gl.allocate_shared_memory(gl.float32, [STAGES, FACTORS * L], d_factors.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    later = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(later.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    number = (first - base) // L + i_row
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.warp_specialize(
        [
            (scan_partition, (
                q_smem, k_smem, v_smem, inverse_smem, pairs_smem, factor_smem, out_smem, ready, later, free, p_states,
                p_out, source, target, first - base, length, i_h, i_v, HV, DK, DV,
            )),
            (copy_partition, (
                d_mixed, d_tiles, d_factors, q_smem, k_smem, v_smem, inverse_smem, pairs_smem, factor_smem, ready,
                later, free, first, number, count, i_h, i_h // (HV // HK), i_v, HK, HV, DK, DV,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def scan_chunks(
    rows: TensorDescriptor, tiles: TensorDescriptor, factors: torch.Tensor, heads: DeltaHeads, states: torch.Tensor,
    step: StateStep, out: torch.Tensor,
) -> None:  # fmt: skip
    """Takes the states of requests behind the short ones through their chunks; out [T, Hv, Dv], of their tokens."""
    d_factors = TensorDescriptor(factors, list(factors.shape), [1], [FACTORS.value * L.value], FACTOR_LAYOUT)
    delta_scan_gluon_kernel[(heads.value_dim // VALUES.value, heads.num_values, step.num_long)](
        rows, tiles, d_factors, states, step.starts, step.sources, step.slots, out, step.num_short * step.short_len,
        step.num_short, HK=heads.num_keys, HV=heads.num_values, DK=heads.key_dim, DV=heads.value_dim, num_warps=4,
        maxnreg=136, **early_launch(states.device),
    )  # fmt: skip
