# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Gated delta nets over many tokens in Triton, a chunk at a time.

What each token of a chunk changes depends on those before it by a triangular system (the WY form of Yang et al., 2024).
All chunks' are inverted at once by products, of blocks twice as large each time; in 16 bits their factors are fp16,
whose mantissas are longer (entries are small: each update is a contraction). Then a program for some of a head's values
goes from chunk to chunk, its state in registers. Queries and keys stay as they came, so that products read them from
shared memory: what norms and decays them are factors of tokens, which go into what the products make.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from app.kernels.kernel_table import Kernel
from app.kernels.launch import cdiv, multiprocessors, next_power_of_2, shared_memory
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import CHUNK, DeltaGates, DeltaHeads, GatedNorm, StateStep
from app.kernels.recurrent.reference import UNIT_EPS
from app.kernels.recurrent.triton_gated_norm import write_gated_norm
from app.kernels.recurrent.triton_math import softplus

_LEAST_DOT = 16  # of each side of a product
_VALUES, _FEW_VALUES = 64, 32  # of a head that a program takes through the chunks; where programs are few
CHUNK_WARPS, SCAN_WARPS, SCAN_STAGES = 4, 4, 2
_STAGED_BYTES = 96 << 10  # of shared memory that a program may use, where those stages fit (AMD's GPUs have 64 KB)


@triton.jit
def inverse(b_system, L: tl.constexpr, LEVELS: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + system)^-1 of a strictly lower triangular system, fp32 [L, L], L = 2^LEVELS; products are of TYPE.

    With the inverse D of the blocks along the diagonal at hand, and N what stands between two neighbours, that of
    blocks twice as large is D - D N D. Blocks of 2 are inverted by a change of sign.
    """
    o_l = tl.arange(0, L)
    m_own = o_l[:, None] // 2 == o_l[None, :] // 2
    b_inverse = tl.where(o_l[:, None] == o_l[None, :], 1.0, tl.where(m_own, -b_system, 0.0))
    for i in tl.static_range(1, LEVELS):
        m_own = o_l[:, None] // (1 << i) == o_l[None, :] // (1 << i)
        m_both = o_l[:, None] // (2 << i) == o_l[None, :] // (2 << i)
        b_known = b_inverse.to(TYPE)
        b_between = tl.where(m_own, 0.0, tl.where(m_both, b_system, 0.0)).to(TYPE)
        b_half = tl.dot(b_known, b_between, input_precision=PRECISION).to(TYPE)
        b_inverse -= tl.dot(b_half, b_known, input_precision=PRECISION)
    return b_inverse


@quick_launch
@triton.jit(do_not_specialize=["base", "num_tokens"])  # numbers of decodes and of tokens: others in each step
def delta_chunk_kernel(
    p_mixed, p_a, p_b, p_a_log, p_dt_bias, p_chunks, p_read, p_new, p_pairs, p_factors, base, num_tokens,
    stride_mixed, stride_a, stride_b, scale, rate_scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L: tl.constexpr, LEVELS: tl.constexpr, EPS: tl.constexpr, SOLVED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (N, HV): of a chunk, what its tokens change if the state before it is zeros (`new`), what of that state
    they take off (`read`), what each query gets of each change (`pairs`), and three factors of each token."""
    i_c, i_h = tl.program_id(0), tl.program_id(1)
    i_key = i_h // (HV // HK)
    b_first, b_end = tl.load(p_chunks + 2 * i_c), tl.load(p_chunks + 2 * i_c + 1)
    o_l, o_k, o_v = tl.arange(0, L), tl.arange(0, BK), tl.arange(0, BV)
    m_l, m_k, m_v = o_l < b_end - b_first, o_k < DK, o_v < DV
    m_lk, m_lv = m_l[:, None] & m_k[None, :], m_l[:, None] & m_v[None, :]
    i_first, i_own = b_first.to(tl.int64), (b_first - base).to(tl.int64)  # among all tokens, and among the long rows'
    p_row = p_mixed + i_first * stride_mixed
    o_key = o_l[:, None] * stride_mixed + o_k[None, :]
    b_q = tl.load(p_row + i_key * DK + o_key, mask=m_lk, other=0.0)
    b_k = tl.load(p_row + (HK + i_key) * DK + o_key, mask=m_lk, other=0.0)
    b_qn = tl.rsqrt(tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1) + EPS) * scale
    b_kn = tl.rsqrt(tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1) + EPS)
    b_a = tl.load(p_a + i_first * stride_a + i_h + o_l * stride_a, mask=m_l, other=0.0).to(tl.float32)
    b_log = -tl.exp(tl.load(p_a_log + i_h)) * softplus(b_a + tl.load(p_dt_bias + i_h))
    b_log = tl.where(m_l, b_log, 0.0)
    b_sum, b_last = tl.cumsum(b_log, 0), tl.sum(b_log, 0)
    b_b = tl.load(p_b + i_first * stride_b + i_h + o_l * stride_b, mask=m_l, other=0.0).to(tl.float32)
    b_rate = tl.sigmoid(b_b) * rate_scale
    p_factor = p_factors + i_h.to(tl.int64) * num_tokens + i_own
    tl.store(p_factor + o_l, b_qn * tl.exp(b_sum), mask=m_l)
    tl.store(p_factor + num_tokens * HV + o_l, b_kn * tl.exp(b_last - b_sum), mask=m_l)
    tl.store(p_factor + num_tokens * (2 * HV) + o_l, tl.exp(b_sum), mask=m_l)
    TYPE = p_mixed.dtype.element_ty
    m_seen = o_l[:, None] >= o_l[None, :]
    b_between = tl.where(m_seen, tl.exp(tl.where(m_seen, b_sum[:, None] - b_sum[None, :], 0.0)), 0.0)
    b_between *= b_kn[None, :]
    b_pairs = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * b_between * b_qn[:, None]
    p_pair = p_pairs + (i_own * HV + i_h) * L
    tl.store(p_pair + o_l[:, None] * (HV * L) + o_l[None, :], b_pairs.to(TYPE), mask=m_l[:, None])
    b_system = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION) * b_between * (b_kn * b_rate)[:, None]
    b_system = tl.where(o_l[:, None] == o_l[None, :], 0.0, b_system)
    b_inverse = inverse(b_system, L, LEVELS, SOLVED, PRECISION) * b_rate[None, :]
    b_keys = (b_inverse * (b_kn * tl.exp(b_sum))[None, :]).to(TYPE)
    b_read = tl.dot(b_keys, b_k, input_precision=PRECISION)
    p_out = p_read + (i_own * HV + i_h) * DK
    tl.store(p_out + o_l[:, None] * (HV * DK) + o_k[None, :], b_read.to(TYPE), mask=m_lk)
    p_value = p_row + 2 * HK * DK + i_h * DV
    b_v = tl.load(p_value + o_l[:, None] * stride_mixed + o_v[None, :], mask=m_lv, other=0.0)
    b_new = tl.dot(b_inverse.to(TYPE), b_v, input_precision=PRECISION)
    p_out = p_new + (i_own * HV + i_h) * DV
    tl.store(p_out + o_l[:, None] * (HV * DV) + o_v[None, :], b_new.to(TYPE), mask=m_lv)


@quick_launch
@triton.jit(do_not_specialize=["base", "num_tokens", "first_row"])
def delta_scan_kernel(
    p_mixed, p_read, p_new, p_pairs, p_factors, p_states, p_starts, p_sources, p_slots, p_out, base, num_tokens,
    first_row, stride_mixed,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows, HV, tiles of BV values): from chunk to chunk of a request, from the first such row on. Tokens go
    along columns, so that what is in registers, state and changes, is each product's first factor."""
    i_r, i_h = first_row + tl.program_id(0), tl.program_id(1)
    i_key = i_h // (HV // HK)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first, b_end = tl.load(p_starts + i_r), tl.load(p_starts + i_r + 1)
    o_l, o_k, o_v = tl.arange(0, L), tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < DK, o_v < DV
    m_state = m_v[:, None] & m_k[None, :]
    o_state = i_h * DV * DK + o_v[:, None] * DK + o_k[None, :]
    b_state = tl.load(p_states + b_source * HV * DV * DK + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_state = b_state.to(tl.float32)
    TYPE = p_mixed.dtype.element_ty
    b_begin = b_first.to(tl.int64)
    # Places of a chunk's numbers behind its first one's.
    o_key, o_read = o_l[:, None] * stride_mixed + o_k[None, :], o_l[:, None] * (HV * DK) + o_k[None, :]
    o_value, o_pair = o_l[None, :] * (HV * DV) + o_v[:, None], o_l[:, None] * (HV * L) + o_l[None, :]
    for i_t in range(b_first, b_end, L):
        m_l = o_l < b_end - i_t
        m_lk, m_vl = m_l[:, None] & m_k[None, :], m_v[:, None] & m_l[None, :]
        i_first = b_begin + (i_t - b_first)
        i_own = i_first - base
        i_head = i_own * HV + i_h
        p_query = p_mixed + i_first * stride_mixed + i_key * DK
        p_factor = p_factors + i_h.to(tl.int64) * num_tokens + i_own
        b_read = tl.load(p_read + i_head * DK + o_read, mask=m_lk, other=0.0)
        b_new = tl.load(p_new + i_head * DV + o_value, mask=m_vl, other=0.0).to(tl.float32)
        b_q = tl.load(p_query + o_key, mask=m_lk, other=0.0)
        b_k = tl.load(p_query + HK * DK + o_key, mask=m_lk, other=0.0)
        b_pairs = tl.load(p_pairs + i_head * L + o_pair, mask=m_l[:, None], other=0.0)
        b_query_factor = tl.load(p_factor + o_l, mask=m_l, other=0.0)
        b_key_factor = tl.load(p_factor + num_tokens * HV + o_l, mask=m_l, other=0.0)
        b_kept = tl.load(p_factor + num_tokens * (2 * HV) + tl.minimum(L, b_end - i_t) - 1)
        b_before = b_state.to(TYPE)
        b_change = b_new - tl.dot(b_before, tl.trans(b_read), input_precision=PRECISION)
        b_o = tl.dot(b_before, tl.trans(b_q), input_precision=PRECISION) * b_query_factor[None, :]
        b_left = (b_change * b_key_factor[None, :]).to(TYPE)
        b_state = b_state * b_kept + tl.dot(b_left, b_k, input_precision=PRECISION)
        b_o += tl.dot(b_change.to(TYPE), tl.trans(b_pairs), input_precision=PRECISION)
        tl.store(p_out + i_head * DV + o_value, b_o.to(TYPE), mask=m_vl)
    tl.store(p_states + b_slot * HV * DV * DK + o_state, b_state, mask=m_state & (b_slot >= 0))


def delta_chunks(
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
    num_tokens = len(mixed) - base
    shape = num_tokens, h.num_values
    read, new, raw, pairs = (mixed.new_empty(*shape, n) for n in (h.key_dim, h.value_dim, h.value_dim, CHUNK))
    factors = mixed.new_empty(3, h.num_values, num_tokens, dtype=torch.float32)
    is_exact = mixed.dtype == torch.float32
    precision = "ieee" if is_exact else "tf32"
    key_tile, value_tile = (max(_LEAST_DOT, next_power_of_2(width)) for width in (h.key_dim, h.value_dim))
    sizes = {"HK": h.num_keys, "HV": h.num_values, "DK": h.key_dim, "DV": h.value_dim, "BK": key_tile}
    delta_chunk_kernel[(len(step.chunks), h.num_values)](
        mixed, gates.a, gates.b, gates.a_log, gates.dt_bias, step.chunks, read, new, pairs, factors, base, num_tokens,
        mixed.stride(0), gates.a.stride(0), gates.b.stride(0), h.key_dim**-0.5, gates.rate_scale,
        **sizes, BV=value_tile, L=CHUNK, LEVELS=CHUNK.bit_length() - 1, EPS=UNIT_EPS,
        SOLVED=tl.float32 if is_exact else tl.float16, PRECISION=precision, num_warps=CHUNK_WARPS,
    )  # fmt: skip
    programs = step.num_long * h.num_values * cdiv(h.value_dim, _VALUES)
    is_few = not is_exact and 2 * programs <= multiprocessors(mixed.device)  # in fp32 the same for all (I6)
    tile = min(value_tile, _FEW_VALUES if is_few else _VALUES)
    is_staged = not is_exact and shared_memory(mixed.device) >= _STAGED_BYTES
    delta_scan_kernel[(step.num_long, h.num_values, cdiv(h.value_dim, tile))](
        mixed, read, new, pairs, factors, states, step.starts, step.sources, step.slots, raw, base, num_tokens,
        step.num_short, mixed.stride(0),
        **sizes, BV=tile, L=CHUNK, PRECISION=precision, num_warps=SCAN_WARPS,
        num_stages=SCAN_STAGES if is_staged else 1,
    )  # fmt: skip
    write_gated_norm(raw, replace(norm, gate=norm.gate[base:]), out[base:])


def serves(mixed: torch.Tensor, heads: DeltaHeads) -> bool:
    """All."""
    return True


KERNEL = Kernel(serves, delta_chunks)
