# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Selective state spaces in Triton: Mamba 2 a chunk at a time, Mamba 1 token by token.

A program holds a head's state, or that of some channels, from a request's first token in the step to its last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, next_power_of_2
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import CHUNK, ScanInputs, SpaceInputs, StateStep
from app.kernels.recurrent.triton_math import softplus

_LEAST_DOT = 16  # of each side of a product
_NUMBERS = 32  # of a head that a program takes through the chunks
_CHANNELS = 64  # of Mamba 1 that a program takes
_MOST = 3.0e38


@quick_launch
@triton.jit
def space_step_kernel(
    p_x, p_b, p_c, p_dt, p_a_log, p_d, p_dt_bias, p_states, p_starts, p_sources, p_slots, p_out,
    stride_x, stride_b, stride_c, stride_dt, dt_least, dt_most,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    LEN: tl.constexpr,
):  # fmt: skip
    """Grid (R, H): LEN tokens of a request."""
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    i_g = i_h // (H // G)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first = tl.load(p_starts + i_r).to(tl.int64)
    o_p, o_n = tl.arange(0, BP), tl.arange(0, BN)
    m_p, m_n = o_p < P, o_n < N
    m_state = m_p[:, None] & m_n[None, :]
    o_state = i_h * P * N + o_p[:, None] * N + o_n[None, :]
    b_state = tl.load(p_states + b_source * H * P * N + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_decay, b_skip, b_bias = -tl.exp(tl.load(p_a_log + i_h)), tl.load(p_d + i_h), tl.load(p_dt_bias + i_h)
    for i in range(LEN):
        i_t = b_first + i
        b_x = tl.load(p_x + i_t * stride_x + i_h * P + o_p, mask=m_p, other=0.0).to(tl.float32)
        b_b = tl.load(p_b + i_t * stride_b + i_g * N + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_c = tl.load(p_c + i_t * stride_c + i_g * N + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_dt = softplus(tl.load(p_dt + i_t * stride_dt + i_h).to(tl.float32) + b_bias)
        b_dt = tl.minimum(tl.maximum(b_dt, dt_least), dt_most)
        b_state = b_state * tl.exp(b_decay * b_dt) + (b_x * b_dt)[:, None] * b_b[None, :]
        b_o = tl.sum(b_state * b_c[None, :], 1) + b_x * b_skip
        tl.store(p_out + (i_t * H + i_h) * P + o_p, b_o.to(p_out.dtype.element_ty), mask=m_p)
    tl.store(p_states + b_slot * H * P * N + o_state, b_state, mask=m_state & (b_slot >= 0))


@quick_launch
@triton.jit(do_not_specialize=["first_row"])  # a number of decodes, which is another one in each step
def space_scan_kernel(
    p_x, p_b, p_c, p_dt, p_a_log, p_d, p_dt_bias, p_states, p_starts, p_sources, p_slots, p_out, first_row,
    stride_x, stride_b, stride_c, stride_dt, dt_least, dt_most,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (rows, H, tiles of BP numbers): from chunk to chunk of a request, from the first such row on."""
    i_r, i_h = first_row + tl.program_id(0), tl.program_id(1)
    i_g = i_h // (H // G)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first, b_end = tl.load(p_starts + i_r), tl.load(p_starts + i_r + 1)
    o_l, o_p, o_n = tl.arange(0, L), tl.program_id(2) * BP + tl.arange(0, BP), tl.arange(0, BN)
    m_p, m_n = o_p < P, o_n < N
    m_state = m_n[:, None] & m_p[None, :]
    o_state = i_h * P * N + o_p[None, :] * N + o_n[:, None]
    b_state = tl.load(p_states + b_source * H * P * N + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_decay, b_skip, b_bias = -tl.exp(tl.load(p_a_log + i_h)), tl.load(p_d + i_h), tl.load(p_dt_bias + i_h)
    TYPE = p_x.dtype.element_ty
    m_seen = o_l[:, None] >= o_l[None, :]
    for i_t in range(b_first, b_end, L):
        o_t = (i_t + o_l).to(tl.int64)
        m_l = i_t + o_l < b_end
        m_lp, m_ln = m_l[:, None] & m_p[None, :], m_l[:, None] & m_n[None, :]
        b_x = tl.load(p_x + o_t[:, None] * stride_x + i_h * P + o_p[None, :], mask=m_lp, other=0.0)
        b_b = tl.load(p_b + o_t[:, None] * stride_b + i_g * N + o_n[None, :], mask=m_ln, other=0.0)
        b_c = tl.load(p_c + o_t[:, None] * stride_c + i_g * N + o_n[None, :], mask=m_ln, other=0.0)
        b_dt = softplus(tl.load(p_dt + o_t * stride_dt + i_h, mask=m_l, other=0.0).to(tl.float32) + b_bias)
        b_dt = tl.where(m_l, tl.minimum(tl.maximum(b_dt, dt_least), dt_most), 0.0)
        b_log = b_decay * b_dt
        b_sum, b_last = tl.cumsum(b_log, 0), tl.sum(b_log, 0)
        b_between = tl.where(m_seen, tl.exp(tl.where(m_seen, b_sum[:, None] - b_sum[None, :], 0.0)), 0.0)
        b_pairs = tl.dot(b_c, tl.trans(b_b), input_precision=PRECISION) * b_between * b_dt[None, :]
        b_o = tl.dot(b_pairs.to(TYPE), b_x, input_precision=PRECISION)
        b_decayed = (b_c.to(tl.float32) * tl.exp(b_sum)[:, None]).to(TYPE)
        b_o += tl.dot(b_decayed, b_state.to(TYPE), input_precision=PRECISION) + b_x.to(tl.float32) * b_skip
        tl.store(p_out + (o_t[:, None] * H + i_h) * P + o_p[None, :], b_o.to(TYPE), mask=m_lp)
        b_left = (b_b.to(tl.float32) * (b_dt * tl.exp(b_last - b_sum))[:, None]).to(TYPE)
        b_state = b_state * tl.exp(b_last) + tl.dot(tl.trans(b_left), b_x, input_precision=PRECISION)
    tl.store(p_states + b_slot * H * P * N + o_state, b_state, mask=m_state & (b_slot >= 0))


@quick_launch
@triton.jit
def selective_scan_kernel(
    p_x, p_b, p_c, p_dt, p_a_log, p_d, p_dt_bias, p_states, p_starts, p_sources, p_slots, p_out,
    stride_x, stride_b, stride_c, stride_dt, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (R, tiles of BD channels)."""
    i_r, o_d, o_n = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD), tl.arange(0, BN)
    m_d, m_n = o_d < D, o_n < N
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first = tl.load(p_starts + i_r).to(tl.int64)
    b_count = tl.load(p_starts + i_r + 1) - b_first
    m_state = m_d[:, None] & m_n[None, :]
    o_state = o_d[:, None] * N + o_n[None, :]
    b_state = tl.load(p_states + b_source * D * N + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_decay = -tl.exp(tl.load(p_a_log + o_state, mask=m_state, other=0.0))
    b_skip = tl.load(p_d + o_d, mask=m_d, other=0.0)
    b_bias = tl.load(p_dt_bias + o_d, mask=m_d, other=0.0)
    for i in range(b_count):
        i_t = b_first + i
        b_x = tl.load(p_x + i_t * stride_x + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_b = tl.load(p_b + i_t * stride_b + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_c = tl.load(p_c + i_t * stride_c + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_dt = softplus(tl.load(p_dt + i_t * stride_dt + o_d, mask=m_d, other=0.0).to(tl.float32) + b_bias)
        b_state = b_state * tl.exp(b_dt[:, None] * b_decay) + (b_dt * b_x)[:, None] * b_b[None, :]
        b_o = tl.sum(b_state * b_c[None, :], 1) + b_x * b_skip
        tl.store(p_out + i_t * D + o_d, b_o.to(p_out.dtype.element_ty), mask=m_d)
    tl.store(p_states + b_slot * D * N + o_state, b_state, mask=m_state & (b_slot >= 0))


def state_space(inputs: SpaceInputs, states: torch.Tensor, step: StateStep) -> torch.Tensor:
    """The same as `reference.state_space`."""
    x, b, c, dt = inputs.x, inputs.b, inputs.c, inputs.dt
    (num_tokens, h, p), (g, n) = x.shape, b.shape[1:]
    assert x.stride(2) == b.stride(2) == c.stride(2) == dt.stride(1) == 1, "rows must be contiguous"
    assert (x.stride(1), b.stride(1), c.stride(1)) == (p, n, n), "rows must be contiguous"
    out = torch.empty(num_tokens, h, p, dtype=x.dtype, device=x.device)
    numbers = (inputs.a_log, inputs.d, inputs.dt_bias)
    least, most = (float(min(max(limit, 0.0), _MOST)) for limit in inputs.dt_limit)
    strides = (x.stride(0), b.stride(0), c.stride(0), dt.stride(0), least, most)
    sizes = {"H": h, "P": p, "G": g, "N": n}
    if step.num_short:
        tiles = next_power_of_2(p), next_power_of_2(n)
        space_step_kernel[(step.num_short, h)](
            x, b, c, dt, *numbers, states, step.starts, step.sources, step.slots, out, *strides,
            **sizes, BP=tiles[0], BN=tiles[1], LEN=step.short_len,
            num_warps=max(1, min(8, tiles[0] * tiles[1] // 2048)),
        )  # fmt: skip
    if step.num_long:
        tiles = (min(_NUMBERS, max(_LEAST_DOT, next_power_of_2(p))), max(_LEAST_DOT, next_power_of_2(n)))
        space_scan_kernel[(step.num_long, h, cdiv(p, tiles[0]))](
            x, b, c, dt, *numbers, states, step.starts, step.sources, step.slots, out, step.num_short,
            *strides, **sizes, BP=tiles[0], BN=tiles[1], L=CHUNK,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=8,
            num_stages=1 if x.dtype == torch.float32 else 2,
        )  # fmt: skip
    return out


def selective_scan(inputs: ScanInputs, states: torch.Tensor, step: StateStep) -> torch.Tensor:
    """The same as `reference.selective_scan`."""
    x, (channels, size) = inputs.x, inputs.a_log.shape
    assert x.stride(1) == inputs.b.stride(1) == inputs.c.stride(1) == inputs.dt.stride(1) == 1, "contiguous rows"
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    if len(x):
        selective_scan_kernel[(len(step.slots), cdiv(channels, _CHANNELS))](
            x, inputs.b, inputs.c, inputs.dt, inputs.a_log, inputs.d, inputs.dt_bias, states,
            step.starts, step.sources, step.slots, out,
            x.stride(0), inputs.b.stride(0), inputs.c.stride(0), inputs.dt.stride(0),
            D=channels, N=size, BD=_CHANNELS, BN=next_power_of_2(size), num_warps=2,
        )  # fmt: skip
    return out
