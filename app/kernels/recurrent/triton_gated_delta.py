# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Gated delta nets in Triton.

Requests that bring few tokens: a program for each head holds its state, reads and writes it once, and ends with the
gated norm. Others go a chunk at a time: within a chunk, what each token changes depends on the tokens before it by a
triangular system (the WY form of Yang et al., 2024), which is solved for all chunks at once, in fp32; then a program
for some of a head's values goes from chunk to chunk. The states that ranks, tiles and neighbours share are none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, next_power_of_2
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import CHUNK, DeltaGates, DeltaHeads, GatedNorm, StateStep
from app.kernels.recurrent.reference import UNIT_EPS
from app.kernels.recurrent.triton_math import softplus

_LEAST_DOT = 16  # of each side of a product
_VALUES = 32  # of a head that a program takes through the chunks


@triton.jit
def unit_rows(b_x, EPS: tl.constexpr):
    """Rows of length 1, fp32 [L, D]."""
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) + EPS)[:, None]


@quick_launch
@triton.jit
def delta_step_kernel(
    p_mixed, p_a, p_b, p_a_log, p_dt_bias, p_gate, p_norm, p_states, p_starts, p_sources, p_slots, p_out,
    stride_mixed, stride_a, stride_b, stride_gate, scale, rate_scale, eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEN: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid (R, HV): LEN tokens of a request."""
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    i_key = i_h // (HV // HK)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first = tl.load(p_starts + i_r).to(tl.int64)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    m_state = m_v[:, None] & m_k[None, :]
    o_state = i_h * DV * DK + o_v[:, None] * DK + o_k[None, :]
    b_state = tl.load(p_states + b_source * HV * DV * DK + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_decay = -tl.exp(tl.load(p_a_log + i_h))
    b_bias = tl.load(p_dt_bias + i_h)
    b_weight = tl.load(p_norm + o_v, mask=m_v, other=0.0).to(tl.float32)
    for i in range(LEN):
        i_t = b_first + i
        p_row = p_mixed + i_t * stride_mixed
        b_q = tl.load(p_row + i_key * DK + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_row + (HK + i_key) * DK + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_row + 2 * HK * DK + i_h * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_q = b_q * tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS) * scale
        b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
        b_a = tl.load(p_a + i_t * stride_a + i_h).to(tl.float32)
        b_rate = tl.sigmoid(tl.load(p_b + i_t * stride_b + i_h).to(tl.float32)) * rate_scale
        b_state = b_state * tl.exp(b_decay * softplus(b_a + b_bias))
        b_change = (b_v - tl.sum(b_state * b_k[None, :], 1)) * b_rate
        b_state += b_change[:, None] * b_k[None, :]
        b_o = tl.sum(b_state * b_q[None, :], 1)
        b_o = b_o * tl.rsqrt(tl.sum(b_o * b_o, 0) / DV + eps) * b_weight
        b_gate = tl.load(p_gate + i_t * stride_gate + i_h * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_o = b_o * b_gate * tl.sigmoid(b_gate)
        tl.store(p_out + (i_t * HV + i_h) * DV + o_v, b_o.to(p_out.dtype.element_ty), mask=m_v)
    tl.store(p_states + b_slot * HV * DV * DK + o_state, b_state, mask=m_state & (b_slot >= 0))


@quick_launch
@triton.jit(do_not_specialize=["base"])  # a number of decodes, which is another one in each step
def delta_chunk_kernel(
    p_mixed, p_a, p_b, p_a_log, p_dt_bias, p_chunks, p_read, p_new, p_decay, base,
    stride_mixed, stride_a, stride_b, rate_scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N, HV): of a chunk, what its tokens change if the state before it is zeros (`new`), what of that state
    they take off (`read`), and the sums of the logarithms of decays."""
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    i_key = i_h // (HV // HK)
    b_first, b_end = tl.load(p_chunks + 2 * i_c), tl.load(p_chunks + 2 * i_c + 1)
    o_l, o_k, o_v = tl.arange(0, L), tl.arange(0, BK), tl.arange(0, BV)
    o_t = (b_first + o_l).to(tl.int64)
    m_l, m_k, m_v = b_first + o_l < b_end, o_k < DK, o_v < DV
    p_key = p_mixed + o_t[:, None] * stride_mixed + (HK + i_key) * DK + o_k[None, :]
    b_k = unit_rows(tl.load(p_key, mask=m_l[:, None] & m_k[None, :], other=0.0).to(tl.float32), EPS)
    b_a = tl.load(p_a + o_t * stride_a + i_h, mask=m_l, other=0.0).to(tl.float32) + tl.load(p_dt_bias + i_h)
    b_log = -tl.exp(tl.load(p_a_log + i_h)) * softplus(b_a)
    b_sum = tl.cumsum(tl.where(m_l, b_log, 0.0), 0)
    b_rate = tl.sigmoid(tl.load(p_b + o_t * stride_b + i_h, mask=m_l, other=0.0).to(tl.float32)) * rate_scale
    m_lower = o_l[:, None] > o_l[None, :]
    b_between = tl.where(m_lower, tl.exp(tl.where(m_lower, b_sum[:, None] - b_sum[None, :], 0.0)), 0.0)
    TYPE = p_mixed.dtype.element_ty
    b_ks = b_k.to(TYPE)
    b_system = tl.dot(b_ks, tl.trans(b_ks), input_precision=PRECISION) * b_between * b_rate[:, None]
    # The inverse of 1 + system, row by row: each is what is left of the unit row once those before it are taken off.
    b_inverse = tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0)
    for i in range(1, L):
        m_row = (o_l == i)[:, None]
        b_row = tl.sum(tl.where(m_row, b_system, 0.0), 0)
        b_off = tl.sum(b_row[:, None] * b_inverse, 0)
        b_inverse = tl.where(m_row, b_inverse - b_off[None, :], b_inverse)
    b_inverse = b_inverse.to(TYPE)
    b_keys = (b_k * (b_rate * tl.exp(b_sum))[:, None]).to(TYPE)
    b_read = tl.dot(b_inverse, b_keys, input_precision=PRECISION)
    o_out = (o_t - base) * HV + i_h
    tl.store(p_read + o_out[:, None] * DK + o_k[None, :], b_read.to(TYPE), mask=m_l[:, None] & m_k[None, :])
    p_value = p_mixed + o_t[:, None] * stride_mixed + 2 * HK * DK + i_h * DV + o_v[None, :]
    b_v = tl.load(p_value, mask=m_l[:, None] & m_v[None, :], other=0.0).to(tl.float32)
    b_new = tl.dot(b_inverse, (b_v * b_rate[:, None]).to(TYPE), input_precision=PRECISION)
    tl.store(p_new + o_out[:, None] * DV + o_v[None, :], b_new.to(TYPE), mask=m_l[:, None] & m_v[None, :])
    tl.store(p_decay + o_out, b_sum, mask=m_l)


@quick_launch
@triton.jit(do_not_specialize=["base", "first_row"])
def delta_scan_kernel(
    p_mixed, p_read, p_new, p_decay, p_states, p_starts, p_sources, p_slots, p_out, base, first_row,
    stride_mixed, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows, HV, tiles of BV values): from chunk to chunk of a request, from the first such row on."""
    i_r, i_h = first_row + tl.program_id(0), tl.program_id(1)
    i_key = i_h // (HV // HK)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first, b_end = tl.load(p_starts + i_r), tl.load(p_starts + i_r + 1)
    o_l, o_k, o_v = tl.arange(0, L), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    m_state = m_k[:, None] & m_v[None, :]
    o_state = i_h * DV * DK + o_v[None, :] * DK + o_k[:, None]
    b_state = tl.load(p_states + b_source * HV * DV * DK + o_state, mask=m_state & (b_source >= 0), other=0.0)
    TYPE = p_mixed.dtype.element_ty
    m_seen = o_l[:, None] >= o_l[None, :]
    for i_t in range(b_first, b_end, L):
        o_t = (i_t + o_l).to(tl.int64)
        m_l = i_t + o_l < b_end
        m_lk, m_lv = m_l[:, None] & m_k[None, :], m_l[:, None] & m_v[None, :]
        p_query = p_mixed + o_t[:, None] * stride_mixed + i_key * DK + o_k[None, :]
        b_q = unit_rows(tl.load(p_query, mask=m_lk, other=0.0).to(tl.float32), EPS) * scale
        b_k = unit_rows(tl.load(p_query + HK * DK, mask=m_lk, other=0.0).to(tl.float32), EPS)
        o_in = (o_t - base) * HV + i_h
        b_sum = tl.load(p_decay + o_in, mask=m_l, other=0.0)
        b_last = tl.load(p_decay + (tl.minimum(i_t + L, b_end) - 1 - base).to(tl.int64) * HV + i_h)
        b_read = tl.load(p_read + o_in[:, None] * DK + o_k[None, :], mask=m_lk, other=0.0)
        b_new = tl.load(p_new + o_in[:, None] * DV + o_v[None, :], mask=m_lv, other=0.0).to(tl.float32)
        b_before = b_state.to(TYPE)
        b_change = (b_new - tl.dot(b_read, b_before, input_precision=PRECISION)).to(TYPE)
        m_pair = m_seen & m_l[:, None]
        b_between = tl.where(m_pair, tl.exp(tl.where(m_pair, b_sum[:, None] - b_sum[None, :], 0.0)), 0.0)
        b_pairs = tl.dot(b_q.to(TYPE), tl.trans(b_k.to(TYPE)), input_precision=PRECISION) * b_between
        b_decayed = (b_q * tl.exp(b_sum)[:, None]).to(TYPE)
        b_o = tl.dot(b_decayed, b_before, input_precision=PRECISION)
        b_o += tl.dot(b_pairs.to(TYPE), b_change, input_precision=PRECISION)
        tl.store(p_out + o_in[:, None] * DV + o_v[None, :], b_o.to(TYPE), mask=m_lv)
        b_left = (b_k * tl.where(m_l, tl.exp(b_last - b_sum), 0.0)[:, None]).to(TYPE)
        b_state = b_state * tl.exp(b_last) + tl.dot(tl.trans(b_left), b_change, input_precision=PRECISION)
    tl.store(p_states + b_slot * HV * DV * DK + o_state, b_state, mask=m_state & (b_slot >= 0))


@quick_launch
@triton.jit
def gated_norm_kernel(
    p_x, p_gate, p_weight, p_out, stride_gate, eps, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """Grid (T, H)."""
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    b_x = tl.load(p_x + (i_t * H + i_h) * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + i_t * stride_gate + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps) * b_weight * tl.sigmoid(b_gate)
    if not SIGMOID:
        b_x *= b_gate
    tl.store(p_out + (i_t * H + i_h) * D + o_d, b_x.to(p_out.dtype.element_ty), mask=m_d)


def gated_delta(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The same as `reference.gated_delta`."""
    assert mixed.stride(1) == norm.gate.stride(1) == gates.a.stride(1) == gates.b.stride(1) == 1, "contiguous rows"
    assert states.is_contiguous(), "states must be contiguous"
    out = torch.empty(len(mixed), heads.num_values * heads.value_dim, dtype=mixed.dtype, device=mixed.device)
    if step.num_short:
        _few_tokens(mixed, heads, gates, norm, states, step, out)
    if step.num_long:
        _many_tokens(mixed, heads, gates, norm, states, step, out)
    return out


def _few_tokens(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
    out: torch.Tensor,
) -> None:
    key_tile, value_tile = next_power_of_2(heads.key_dim), next_power_of_2(heads.value_dim)
    delta_step_kernel[(step.num_short, heads.num_values)](
        mixed, gates.a, gates.b, gates.a_log, gates.dt_bias, norm.gate, norm.weight, states,
        step.starts, step.sources, step.slots, out,
        mixed.stride(0), gates.a.stride(0), gates.b.stride(0), norm.gate.stride(0), heads.key_dim**-0.5,
        gates.rate_scale, norm.eps,
        HK=heads.num_keys, HV=heads.num_values, DK=heads.key_dim, DV=heads.value_dim, BK=key_tile, BV=value_tile,
        LEN=step.short_len, EPS=UNIT_EPS, num_warps=max(1, min(8, key_tile * value_tile // 2048)),
    )  # fmt: skip


def _many_tokens(
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
    shape = (len(mixed) - base, h.num_values)
    read, new, raw = (mixed.new_empty(*shape, width) for width in (h.key_dim, h.value_dim, h.value_dim))
    decay = mixed.new_empty(shape, dtype=torch.float32)
    precision = "ieee" if mixed.dtype == torch.float32 else "tf32"
    key_tile, value_tile = (max(_LEAST_DOT, next_power_of_2(width)) for width in (h.key_dim, h.value_dim))
    sizes = {"HK": h.num_keys, "HV": h.num_values, "DK": h.key_dim, "DV": h.value_dim, "BK": key_tile}
    delta_chunk_kernel[(len(step.chunks), h.num_values)](
        mixed, gates.a, gates.b, gates.a_log, gates.dt_bias, step.chunks, read, new, decay, base,
        mixed.stride(0), gates.a.stride(0), gates.b.stride(0), gates.rate_scale,
        **sizes, BV=value_tile, L=CHUNK, EPS=UNIT_EPS, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    tile = min(value_tile, _VALUES)
    delta_scan_kernel[(step.num_long, h.num_values, cdiv(h.value_dim, tile))](
        mixed, read, new, decay, states, step.starts, step.sources,
        step.slots, raw, base, step.num_short, mixed.stride(0), h.key_dim**-0.5,
        **sizes, BV=tile, L=CHUNK, EPS=UNIT_EPS, PRECISION=precision, num_warps=8,
        num_stages=1 if mixed.dtype == torch.float32 else 2,
    )  # fmt: skip
    gate = norm.gate[base:]
    gated_norm_kernel[shape](
        raw, gate, norm.weight, out[base:], gate.stride(0), norm.eps,
        H=h.num_values, D=h.value_dim, BD=next_power_of_2(h.value_dim), SIGMOID=False, num_warps=1,
    )  # fmt: skip
