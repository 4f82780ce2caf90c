# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Selective state spaces in Triton: Mamba 2 over few tokens, and Mamba 1, token by token.

A program holds a head's state, or that of some channels, from a request's first token in the step to its last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, next_power_of_2
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import ScanInputs, SpaceInputs, StateStep
from app.kernels.recurrent.triton_math import softplus
from app.kernels.recurrent.triton_space_chunks import finite_limits, space_chunks

_CHANNELS = 64  # of Mamba 1 that a program takes


@quick_launch
@triton.jit
def space_step_kernel(
    p_x, p_b, p_c, p_dt, p_a_log, p_d, p_dt_bias, p_states, p_starts, p_counts, p_sources, p_slots, p_out,
    stride_x, stride_b, stride_c, stride_dt, dt_least, dt_most,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    LEN: tl.constexpr,
):  # fmt: skip
    """Grid (R, H): LEN tokens of a request, or as many of them as it says."""
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    i_g = i_h // (H // G)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first = tl.load(p_starts + i_r).to(tl.int64)
    o_p, o_n = tl.arange(0, BP), tl.arange(0, BN)
    m_p, m_n = o_p < P, o_n < N
    m_state = m_p[:, None] & m_n[None, :]
    o_state = i_h * P * N + o_p[:, None] * N + o_n[None, :]
    b_state = tl.load(p_states + b_source * H * P * N + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_state = b_state.to(tl.float32)
    b_decay, b_skip, b_bias = -tl.exp(tl.load(p_a_log + i_h)), tl.load(p_d + i_h), tl.load(p_dt_bias + i_h)
    if p_counts is None:
        b_count = LEN
    else:
        b_count = tl.load(p_counts + i_r)
    for i in range(b_count):
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
@triton.jit
def selective_scan_kernel(
    p_x, p_b, p_c, p_dt, p_a_log, p_d, p_dt_bias, p_states, p_starts, p_counts, p_sources, p_slots, p_out,
    stride_x, stride_b, stride_c, stride_dt, D: tl.constexpr, N: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (R, tiles of BD channels)."""
    i_r, o_d, o_n = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD), tl.arange(0, BN)
    m_d, m_n = o_d < D, o_n < N
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first = tl.load(p_starts + i_r).to(tl.int64)
    if p_counts is None:
        b_count = tl.load(p_starts + i_r + 1) - b_first
    else:
        b_count = tl.load(p_counts + i_r).to(tl.int64)
    m_state = m_d[:, None] & m_n[None, :]
    o_state = o_d[:, None] * N + o_n[None, :]
    b_state = tl.load(p_states + b_source * D * N + o_state, mask=m_state & (b_source >= 0), other=0.0)
    b_state = b_state.to(tl.float32)
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
    strides = (x.stride(0), b.stride(0), c.stride(0), dt.stride(0), *finite_limits(inputs))
    sizes = {"H": h, "P": p, "G": g, "N": n}
    if step.num_short:
        tiles = next_power_of_2(p), next_power_of_2(n)
        space_step_kernel[(step.num_short, h)](
            x, b, c, dt, *numbers, states, step.starts, step.counts, step.sources, step.slots, out, *strides,
            **sizes, BP=tiles[0], BN=tiles[1], LEN=step.short_len,
            num_warps=max(1, min(8, tiles[0] * tiles[1] // 2048)),
        )  # fmt: skip
    if step.num_long:
        space_chunks(inputs, states, step, out)
    return out


def selective_scan(inputs: ScanInputs, states: torch.Tensor, step: StateStep) -> torch.Tensor:
    """The same as `reference.selective_scan`."""
    x, (channels, size) = inputs.x, inputs.a_log.shape
    assert x.stride(1) == inputs.b.stride(1) == inputs.c.stride(1) == inputs.dt.stride(1) == 1, "contiguous rows"
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    if len(x):
        selective_scan_kernel[(len(step.slots), cdiv(channels, _CHANNELS))](
            x, inputs.b, inputs.c, inputs.dt, inputs.a_log, inputs.d, inputs.dt_bias, states,
            step.starts, step.counts, step.sources, step.slots, out,
            x.stride(0), inputs.b.stride(0), inputs.c.stride(0), inputs.dt.stride(0),
            D=channels, N=size, BD=_CHANNELS, BN=next_power_of_2(size), num_warps=2,
        )  # fmt: skip
    return out
