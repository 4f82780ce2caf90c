# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Mamba 2 over many tokens in Triton, a chunk at a time.

Within a chunk it is attention with a decay: its weights are made for all chunks at once, from one product for all heads
of a group. Then a program for some of a head's numbers goes from chunk to chunk, its state in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, next_power_of_2
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import CHUNK, SpaceInputs, StateStep
from app.kernels.recurrent.triton_math import softplus

_LEAST_DOT = 16  # of each side of a product
_NUMBERS = 64  # of a head that a program takes through the chunks
_HEADS = 8  # of a group that share a product
_MOST = 3.0e38


@quick_launch
@triton.jit(do_not_specialize=["base", "num_tokens"])  # numbers of decodes and of tokens: others in each step
def space_chunk_kernel(
    p_b, p_c, p_dt, p_a_log, p_dt_bias, p_chunks, p_pairs, p_factors, base, num_tokens,
    stride_b, stride_c, stride_dt, dt_least, dt_most,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (chunks, H / HEADS): what each token gets of each one's input (`pairs`), and two factors of each token: what
    is kept of the state before the chunk, and of its input in the state behind it."""
    i_c, i_first = tl.program_id(0), tl.program_id(1) * HEADS
    i_g = i_first // (H // G)
    b_first, b_end = tl.load(p_chunks + 2 * i_c), tl.load(p_chunks + 2 * i_c + 1)
    o_l, o_n = tl.arange(0, L), tl.arange(0, BN)
    o_t = (b_first + o_l).to(tl.int64)
    m_l, m_n = b_first + o_l < b_end, o_n < N
    m_ln = m_l[:, None] & m_n[None, :]
    b_b = tl.load(p_b + o_t[:, None] * stride_b + i_g * N + o_n[None, :], mask=m_ln, other=0.0)
    b_c = tl.load(p_c + o_t[:, None] * stride_c + i_g * N + o_n[None, :], mask=m_ln, other=0.0)
    b_product = tl.dot(b_c, tl.trans(b_b), input_precision=PRECISION)
    m_seen = o_l[:, None] >= o_l[None, :]
    for i in range(HEADS):
        i_h = i_first + i
        b_dt = tl.load(p_dt + o_t * stride_dt + i_h, mask=m_l, other=0.0).to(tl.float32)
        b_dt = softplus(b_dt + tl.load(p_dt_bias + i_h))
        b_dt = tl.where(m_l, tl.minimum(tl.maximum(b_dt, dt_least), dt_most), 0.0)
        b_log = -tl.exp(tl.load(p_a_log + i_h)) * b_dt
        b_sum, b_last = tl.cumsum(b_log, 0), tl.sum(b_log, 0)
        p_factor = p_factors + i_h.to(tl.int64) * num_tokens + o_t - base
        tl.store(p_factor, tl.exp(b_sum), mask=m_l)
        tl.store(p_factor + num_tokens * H, b_dt * tl.exp(b_last - b_sum), mask=m_l)
        b_between = tl.where(m_seen, tl.exp(tl.where(m_seen, b_sum[:, None] - b_sum[None, :], 0.0)), 0.0)
        p_pair = p_pairs + ((o_t - base) * H + i_h)[:, None] * L + o_l[None, :]
        b_pairs = b_product * b_between * b_dt[None, :]
        tl.store(p_pair, b_pairs.to(p_pairs.dtype.element_ty), mask=m_l[:, None])


@quick_launch
@triton.jit(do_not_specialize=["base", "num_tokens", "first_row"])
def space_scan_kernel(
    p_x, p_b, p_c, p_d, p_pairs, p_factors, p_states, p_starts, p_sources, p_slots, p_out, base, num_tokens, first_row,
    stride_x, stride_b, stride_c,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows, H, tiles of BP numbers): from chunk to chunk of a request, from the first such row on. Tokens go
    along columns, so that what is in registers, state and inputs, is each product's first factor."""
    i_r, i_h = first_row + tl.program_id(0), tl.program_id(1)
    i_g = i_h // (H // G)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first, b_end = tl.load(p_starts + i_r), tl.load(p_starts + i_r + 1)
    o_l, o_p, o_n = tl.arange(0, L), tl.program_id(2) * BP + tl.arange(0, BP), tl.arange(0, BN)
    m_p, m_n = o_p < P, o_n < N
    m_state = m_p[:, None] & m_n[None, :]
    o_state = i_h * P * N + o_p[:, None] * N + o_n[None, :]
    b_state = tl.load(p_states + b_source * H * P * N + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_state = b_state.to(tl.float32)
    b_skip = tl.load(p_d + i_h)
    TYPE = p_x.dtype.element_ty
    for i_t in range(b_first, b_end, L):
        o_t = (i_t + o_l).to(tl.int64)
        m_l = i_t + o_l < b_end
        m_ln, m_pl = m_l[:, None] & m_n[None, :], m_p[:, None] & m_l[None, :]
        b_x = tl.load(p_x + o_t[None, :] * stride_x + i_h * P + o_p[:, None], mask=m_pl, other=0.0)
        b_b = tl.load(p_b + o_t[:, None] * stride_b + i_g * N + o_n[None, :], mask=m_ln, other=0.0)
        b_c = tl.load(p_c + o_t[:, None] * stride_c + i_g * N + o_n[None, :], mask=m_ln, other=0.0)
        p_pair = p_pairs + ((o_t - base) * H + i_h)[:, None] * L + o_l[None, :]
        b_pairs = tl.load(p_pair, mask=m_l[:, None], other=0.0)
        p_factor = p_factors + i_h.to(tl.int64) * num_tokens - base
        b_read = tl.load(p_factor + o_t, mask=m_l, other=0.0)
        b_left = tl.load(p_factor + num_tokens * H + o_t, mask=m_l, other=0.0)
        b_kept = tl.load(p_factor + tl.minimum(i_t + L, b_end) - 1)
        b_o = tl.dot(b_state.to(TYPE), tl.trans(b_c), input_precision=PRECISION) * b_read[None, :]
        b_given = b_x.to(tl.float32)
        b_state *= b_kept
        b_state += tl.dot((b_given * b_left[None, :]).to(TYPE), b_b, input_precision=PRECISION)
        b_o += tl.dot(b_x, tl.trans(b_pairs), input_precision=PRECISION) + b_given * b_skip
        tl.store(p_out + (o_t[None, :] * H + i_h) * P + o_p[:, None], b_o.to(TYPE), mask=m_pl)
    tl.store(p_states + b_slot * H * P * N + o_state, b_state, mask=m_state & (b_slot >= 0))


def finite_limits(inputs: SpaceInputs) -> tuple[float, float]:
    """Those of dt, which kernels take as fp32."""
    least, most = (float(min(max(limit, 0.0), _MOST)) for limit in inputs.dt_limit)
    return least, most


def space_chunks(inputs: SpaceInputs, states: torch.Tensor, step: StateStep, out: torch.Tensor) -> None:
    """The requests behind the short ones, whose tokens are all behind theirs."""
    x, b, c, dt = inputs.x, inputs.b, inputs.c, inputs.dt
    (h, p), (g, n), base = x.shape[1:], b.shape[1:], step.num_short * step.short_len
    num_tokens, is_exact = len(x) - base, x.dtype == torch.float32
    pairs, factors = x.new_empty(num_tokens, h, CHUNK), x.new_empty(2, h, num_tokens, dtype=torch.float32)
    heads = next(size for size in range(min(_HEADS, h // g), 0, -1) if (h // g) % size == 0)
    tiles = min(_NUMBERS, max(_LEAST_DOT, next_power_of_2(p))), max(_LEAST_DOT, next_power_of_2(n))
    precision = "ieee" if is_exact else "tf32"
    space_chunk_kernel[(len(step.chunks), h // heads)](
        b, c, dt, inputs.a_log, inputs.dt_bias, step.chunks, pairs, factors, base, num_tokens,
        b.stride(0), c.stride(0), dt.stride(0), *finite_limits(inputs),
        H=h, G=g, N=n, BN=tiles[1], HEADS=heads, L=CHUNK, PRECISION=precision, num_warps=4,
    )  # fmt: skip
    space_scan_kernel[(step.num_long, h, cdiv(p, tiles[0]))](
        x, b, c, inputs.d, pairs, factors, states, step.starts, step.sources, step.slots, out, base, num_tokens,
        step.num_short, x.stride(0), b.stride(0), c.stride(0),
        H=h, P=p, G=g, N=n, BP=tiles[0], BN=tiles[1], L=CHUNK, PRECISION=precision,
        num_warps=4 if tiles[1] <= 128 else 8, num_stages=1 if is_exact else 2,
    )  # fmt: skip
