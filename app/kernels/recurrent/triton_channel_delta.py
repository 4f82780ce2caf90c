# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Kimi Delta Attention in Triton: gated delta nets each of whose key channels decays by itself.

As in `triton_delta_chunks.py`, but that no one number a token says how much two tokens' keys have decayed between each
other. So prompts go by short chunks, whose pairs of tokens are summed channel by channel, each decay as the power of a
difference, which is never above 1. What a chunk does for itself is made for all chunks at once; a program for some of a
head's values then takes its state from chunk to chunk.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, next_power_of_2
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import CHUNK, DeltaGates, DeltaHeads, GatedNorm, StateStep
from app.kernels.recurrent.reference import UNIT_EPS
from app.kernels.recurrent.triton_gated_norm import write_gated_norm
from app.kernels.recurrent.triton_math import softplus, unit_rows

_SHORT = 16  # tokens of a chunk
_VALUES = 32  # of a head that a program takes through the chunks


@quick_launch
@triton.jit
def channel_step_kernel(
    p_mixed, p_a, p_b, p_a_log, p_dt_bias, p_gate, p_norm, p_states, p_starts, p_counts, p_sources, p_slots, p_out,
    stride_mixed, stride_a, stride_b, stride_gate, scale, eps,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LEN: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    """Grid (R, H): LEN tokens of a request, or as many of them as it says."""
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    b_slot, b_source = tl.load(p_slots + i_r).to(tl.int64), tl.load(p_sources + i_r).to(tl.int64)
    o_state = (i_h * DV + o_v[:, None]) * DK + o_k[None, :]
    m_state = m_v[:, None] & m_k[None, :]
    b_state = tl.load(p_states + b_source * H * DV * DK + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_state = b_state.to(tl.float32)
    b_pace = -tl.exp(tl.load(p_a_log + i_h))
    b_bias = tl.load(p_dt_bias + i_h * DK + o_k, mask=m_k, other=0.0)
    b_weight = tl.load(p_norm + o_v, mask=m_v, other=0.0).to(tl.float32)
    i_first = tl.load(p_starts + i_r).to(tl.int64)
    if p_counts is None:
        b_count = LEN
    else:
        b_count = tl.load(p_counts + i_r)
    for i_t in range(i_first, i_first + b_count):
        p_head = p_mixed + i_t * stride_mixed + i_h * DK + o_k
        b_q = tl.load(p_head, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_head + H * DK, mask=m_k, other=0.0).to(tl.float32)
        b_a = tl.load(p_a + i_t * stride_a + i_h * DK + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_state *= tl.exp(b_pace * softplus(b_a + b_bias))[None, :]
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
        b_known = tl.sum(b_state * b_k[None, :], 1)
        b_v = tl.load(p_mixed + i_t * stride_mixed + 2 * H * DK + i_h * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_rate = tl.sigmoid(tl.load(p_b + i_t * stride_b + i_h).to(tl.float32))
        b_state += ((b_v - b_known) * b_rate)[:, None] * b_k[None, :]
        b_o = tl.sum(b_state * b_q[None, :], 1) * (tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS) * scale)
        b_gate = tl.load(p_gate + i_t * stride_gate + i_h * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) / DV + eps) * b_weight * tl.sigmoid(b_gate)
        tl.store(p_out + (i_t * H + i_h) * DV + o_v, b_o.to(p_out.dtype.element_ty), mask=m_v)
    tl.store(p_states + b_slot * H * DV * DK + o_state, b_state, mask=m_state & (b_slot >= 0))


@quick_launch
@triton.jit(do_not_specialize=["base", "first_row"])
def channel_chunk_kernel(
    p_mixed, p_a, p_b, p_a_log, p_dt_bias, p_chunks, p_rows, p_query, p_left, p_read, p_new, p_pairs, p_decay,
    base, first_row, stride_mixed, stride_a, stride_b, scale,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, L: tl.constexpr,
    PARTS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N * PARTS, H): what short chunks, PARTS to each of the step's, do for themselves. Of each token: the
    decayed query, what is left of its key at the chunk's end, what it takes off the state before the chunk, what it
    changes if that is zeros, its query times the chunk's keys; of each chunk: what it leaves of the state."""
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    i_first = tl.load(p_chunks + 2 * (i_c // PARTS)) + (i_c % PARTS) * L
    b_end = tl.load(p_chunks + 2 * (i_c // PARTS) + 1)
    if i_first < b_end:
        o_l, o_k, o_v = tl.arange(0, L), tl.arange(0, BK), tl.arange(0, BV)
        o_t = (i_first + o_l).to(tl.int64)
        m_l, m_k, m_v = i_first + o_l < b_end, o_k < DK, o_v < DV
        m_lk, m_lv = m_l[:, None] & m_k[None, :], m_l[:, None] & m_v[None, :]
        p_head = p_mixed + o_t[:, None] * stride_mixed + i_h * DK + o_k[None, :]
        b_q = unit_rows(tl.load(p_head, mask=m_lk, other=0.0).to(tl.float32), EPS) * scale
        b_k = unit_rows(tl.load(p_head + H * DK, mask=m_lk, other=0.0).to(tl.float32), EPS)
        b_a = tl.load(p_a + o_t[:, None] * stride_a + i_h * DK + o_k[None, :], mask=m_lk, other=0.0).to(tl.float32)
        b_a += tl.load(p_dt_bias + i_h * DK + o_k, mask=m_k, other=0.0)[None, :]
        b_log = tl.where(m_lk, -tl.exp(tl.load(p_a_log + i_h)) * softplus(b_a), 0.0)
        b_sum = tl.cumsum(b_log, 0)
        b_rate = tl.sigmoid(tl.load(p_b + o_t * stride_b + i_h, mask=m_l, other=0.0).to(tl.float32))
        b_system = tl.zeros([L, L], dtype=tl.float32)
        b_pairs = tl.zeros([L, L], dtype=tl.float32)
        for j in range(L):  # the column of the chunk's j-th key
            m_row, m_column = (o_l == j)[:, None], (o_l == j)[None, :]
            b_key = tl.sum(tl.where(m_row, b_k, 0.0), 0)
            b_past = tl.sum(tl.where(m_row, b_sum, 0.0), 0)
            b_key = b_key[None, :] * tl.exp(tl.minimum(b_sum - b_past[None, :], 0.0))
            b_system = tl.where(m_column & (o_l > j)[:, None], tl.sum(b_k * b_key, 1)[:, None], b_system)
            b_pairs = tl.where(m_column & (o_l >= j)[:, None], tl.sum(b_q * b_key, 1)[:, None], b_pairs)
        b_system *= b_rate[:, None]
        b_inverse = tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0)
        for i in range(1, L):  # row by row, as in delta_chunk_kernel
            m_row = (o_l == i)[:, None]
            b_off = tl.sum(tl.sum(tl.where(m_row, b_system, 0.0), 0)[:, None] * b_inverse, 0)
            b_inverse = tl.where(m_row, b_inverse - b_off[None, :], b_inverse)
        TYPE = p_mixed.dtype.element_ty
        b_decayed, b_inverse = tl.exp(b_sum), b_inverse.to(TYPE)
        b_read = tl.dot(b_inverse, (b_k * b_decayed * b_rate[:, None]).to(TYPE), input_precision=PRECISION)
        p_value = p_mixed + o_t[:, None] * stride_mixed + 2 * H * DK + i_h * DV + o_v[None, :]
        b_v = tl.load(p_value, mask=m_lv, other=0.0).to(tl.float32) * b_rate[:, None]
        b_new = tl.dot(b_inverse, b_v.to(TYPE), input_precision=PRECISION)
        b_last = tl.sum(b_log, 0)
        o_out = (o_t - base) * H + i_h
        o_lk = o_out[:, None] * DK + o_k[None, :]
        tl.store(p_query + o_lk, (b_q * b_decayed).to(TYPE), mask=m_lk)
        tl.store(p_left + o_lk, (b_k * tl.exp(b_last[None, :] - b_sum)).to(TYPE), mask=m_lk)
        tl.store(p_read + o_lk, b_read.to(TYPE), mask=m_lk)
        tl.store(p_new + o_out[:, None] * DV + o_v[None, :], b_new.to(TYPE), mask=m_lv)
        tl.store(p_pairs + o_out[:, None] * L + o_l[None, :], b_pairs.to(TYPE), mask=m_l[:, None])
        # A place of its own for each short chunk: the row's first one, and on.
        i_row = tl.load(p_rows + i_first) - first_row
        i_place = ((i_first - base) // L + i_row).to(tl.int64) * H + i_h
        tl.store(p_decay + i_place * DK + o_k, tl.exp(b_last), mask=m_k)


@quick_launch
@triton.jit(do_not_specialize=["base", "first_row"])
def channel_scan_kernel(
    p_query, p_left, p_read, p_new, p_pairs, p_decay, p_states, p_starts, p_sources, p_slots, p_out, base,
    first_row, H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows, H, tiles of BV values): from short chunk to short chunk of a request, from the first such row on."""
    i_row, i_h = tl.program_id(0), tl.program_id(1)
    i_r = first_row + i_row
    o_l, o_k, o_v = tl.arange(0, L), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    b_slot, b_source = tl.load(p_slots + i_r).to(tl.int64), tl.load(p_sources + i_r).to(tl.int64)
    o_state = (i_h * DV + o_v[None, :]) * DK + o_k[:, None]
    m_state = m_k[:, None] & m_v[None, :]
    b_state = tl.load(p_states + b_source * H * DV * DK + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_state = b_state.to(tl.float32)
    b_first, b_end = tl.load(p_starts + i_r), tl.load(p_starts + i_r + 1)
    TYPE = p_out.dtype.element_ty
    for i_t in range(b_first, b_end, L):
        m_l = i_t + o_l < b_end
        m_lk, m_lv = m_l[:, None] & m_k[None, :], m_l[:, None] & m_v[None, :]
        o_in = (i_t + o_l - base).to(tl.int64) * H + i_h
        o_lk, o_lv = o_in[:, None] * DK + o_k[None, :], o_in[:, None] * DV + o_v[None, :]
        b_before = b_state.to(TYPE)
        b_read = tl.load(p_read + o_lk, mask=m_lk, other=0.0)
        b_change = tl.load(p_new + o_lv, mask=m_lv, other=0.0).to(tl.float32)
        b_change = (b_change - tl.dot(b_read, b_before, input_precision=PRECISION)).to(TYPE)
        b_pairs = tl.load(p_pairs + o_in[:, None] * L + o_l[None, :], mask=m_l[:, None], other=0.0)
        b_o = tl.dot(b_pairs, b_change, input_precision=PRECISION)
        b_o += tl.dot(tl.load(p_query + o_lk, mask=m_lk, other=0.0), b_before, input_precision=PRECISION)
        tl.store(p_out + o_lv, b_o.to(TYPE), mask=m_lv)
        i_place = ((b_first - base) // L + (i_t - b_first) // L + i_row).to(tl.int64) * H + i_h
        b_decay = tl.load(p_decay + i_place * DK + o_k, mask=m_k, other=0.0)
        b_left = tl.load(p_left + o_lk, mask=m_lk, other=0.0)
        b_state = b_state * b_decay[:, None] + tl.dot(tl.trans(b_left), b_change, input_precision=PRECISION)
    tl.store(p_states + b_slot * H * DV * DK + o_state, b_state, mask=m_state & (b_slot >= 0))


def channel_delta(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The same as `reference.channel_delta`."""
    assert norm.sigmoid, "gates are sigmoids"
    assert mixed.stride(1) == norm.gate.stride(1) == gates.a.stride(1) == gates.b.stride(1) == 1, "contiguous rows"
    assert states.is_contiguous(), "states must be contiguous"
    assert heads.num_keys == heads.num_values, "each head has a key of its own"
    out = torch.empty(len(mixed), heads.num_values * heads.value_dim, dtype=mixed.dtype, device=mixed.device)
    tiles = next_power_of_2(heads.key_dim), next_power_of_2(heads.value_dim)
    if step.num_short:
        channel_step_kernel[(step.num_short, heads.num_values)](
            mixed, gates.a, gates.b, gates.a_log, gates.dt_bias, norm.gate, norm.weight, states,
            step.starts, step.counts, step.sources, step.slots, out,
            mixed.stride(0), gates.a.stride(0), gates.b.stride(0), norm.gate.stride(0),
            heads.key_dim**-0.5, norm.eps, H=heads.num_values, DK=heads.key_dim,
            DV=heads.value_dim, BK=tiles[0], BV=tiles[1], LEN=step.short_len, EPS=UNIT_EPS,
            num_warps=max(1, min(8, tiles[0] * tiles[1] // 2048)),
        )  # fmt: skip
    if step.num_long:
        _long_requests(mixed, heads, gates, norm, states, step, out)
    return out


def _long_requests(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
    out: torch.Tensor,
) -> None:
    """The requests behind the short ones, whose tokens are all behind theirs."""
    base, h = step.num_short * step.short_len, heads
    count, parts = len(mixed) - base, CHUNK // _SHORT
    query, left, read = (mixed.new_empty(count, h.num_values, h.key_dim) for _ in range(3))
    new, raw = (mixed.new_empty(count, h.num_values, h.value_dim) for _ in range(2))
    pairs = mixed.new_empty(count, h.num_values, _SHORT)
    decay = mixed.new_empty(count // _SHORT + step.num_long, h.num_values, h.key_dim, dtype=torch.float32)
    made = query, left, read, new, pairs, decay
    key_tile, value_tile = (max(_SHORT, next_power_of_2(width)) for width in (h.key_dim, h.value_dim))
    sizes = {"H": h.num_values, "DK": h.key_dim, "DV": h.value_dim, "BK": key_tile, "L": _SHORT}
    precision = "ieee" if mixed.dtype == torch.float32 else "tf32"
    channel_chunk_kernel[(len(step.chunks) * parts, h.num_values)](
        mixed, gates.a, gates.b, gates.a_log, gates.dt_bias, step.chunks, step.row_of_token, *made,
        base, step.num_short, mixed.stride(0), gates.a.stride(0), gates.b.stride(0), h.key_dim**-0.5,
        **sizes, BV=value_tile, PARTS=parts, EPS=UNIT_EPS, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    tile = min(value_tile, _VALUES)
    channel_scan_kernel[(step.num_long, h.num_values, cdiv(h.value_dim, tile))](
        *made, states, step.starts, step.sources, step.slots, raw, base, step.num_short,
        **sizes, BV=tile, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    write_gated_norm(raw, replace(norm, gate=norm.gate[base:]), out[base:])
