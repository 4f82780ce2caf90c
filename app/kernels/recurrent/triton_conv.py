# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Convolutions over a request's last few tokens in Triton.

Where each request has one token, one launch reads states, computes, and writes them. Else the first launch takes all
tokens for those of one request, and knows of no states, which takes a fraction of the registers; the second one
computes each request's first tokens, whose windows begin in its state, and leaves its last ones there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import StateStep

_CHANNELS = 128  # of a tile
_FEW_TOKENS, _MANY_TOKENS = 4, 16


@triton.jit
def bias_of(p_bias, o_c, m_c):
    """fp32 [BC], zeros without one."""
    b_bias = tl.zeros([o_c.shape[0]], dtype=tl.float32)
    if p_bias is not None:
        b_bias += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    return b_bias


@triton.jit
def activated(b_total, ACTIVATE: tl.constexpr):
    """silu, or as it is."""
    if ACTIVATE:
        b_total = b_total * tl.sigmoid(b_total)
    return b_total


@quick_launch
@triton.jit(do_not_specialize=["num_tokens"])
def causal_conv_step_kernel(
    p_x, p_weight, p_bias, p_states, p_sources, p_slots, p_out, num_tokens, stride_x,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, ACTIVATE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BT requests, each of one token, tiles of BC channels)."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_t, m_c = o_t < num_tokens, o_c < C
    b_source = tl.load(p_sources + o_t, mask=m_t, other=-1).to(tl.int64)
    b_slot = tl.load(p_slots + o_t, mask=m_t, other=-1).to(tl.int64)
    m_kept, m_left = (b_source >= 0)[:, None] & m_c[None, :], (b_slot >= 0)[:, None] & m_c[None, :]
    b_total = tl.zeros([BT, BC], tl.float32) + bias_of(p_bias, o_c, m_c)[None, :]
    for i_w in tl.static_range(W):
        if i_w < W - 1:
            p_kept = p_states + (b_source * (W - 1) + i_w)[:, None] * C + o_c[None, :]
            b_seen = tl.load(p_kept, mask=m_kept, other=0.0).to(tl.float32)
        else:
            p_new = p_x + o_t.to(tl.int64)[:, None] * stride_x + o_c[None, :]
            b_seen = tl.load(p_new, mask=m_t[:, None] & m_c[None, :], other=0.0).to(tl.float32)
        b_total += b_seen * tl.load(p_weight + o_c * W + i_w, mask=m_c, other=0.0).to(tl.float32)[None, :]
        if i_w > 0:
            p_left = p_states + (b_slot * (W - 1) + i_w - 1)[:, None] * C + o_c[None, :]
            tl.store(p_left, b_seen.to(p_states.dtype.element_ty), mask=m_left)
    p_tile = p_out + o_t.to(tl.int64)[:, None] * C + o_c[None, :]
    b_out = activated(b_total, ACTIVATE).to(p_out.dtype.element_ty)
    tl.store(p_tile, b_out, mask=m_t[:, None] & m_c[None, :])


@quick_launch
@triton.jit(do_not_specialize=["num_tokens"])
def causal_conv_kernel(
    p_x, p_weight, p_bias, p_out, num_tokens, stride_x,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, ACTIVATE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BT tokens, tiles of BC channels): what is right of a request's tokens from the W-th one on."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_t, m_c = o_t < num_tokens, o_c < C
    p_first = p_x + (o_t - (W - 1)).to(tl.int64)[:, None] * stride_x + o_c[None, :]
    b_total = tl.zeros([BT, BC], tl.float32) + bias_of(p_bias, o_c, m_c)[None, :]
    for i_w in tl.static_range(W):
        m_seen = (m_t & (o_t >= W - 1 - i_w))[:, None] & m_c[None, :]
        b_seen = tl.load(p_first + i_w * stride_x, mask=m_seen, other=0.0).to(tl.float32)
        b_total += b_seen * tl.load(p_weight + o_c * W + i_w, mask=m_c, other=0.0).to(tl.float32)[None, :]
    p_tile = p_out + o_t.to(tl.int64)[:, None] * C + o_c[None, :]
    b_out = activated(b_total, ACTIVATE).to(p_out.dtype.element_ty)
    tl.store(p_tile, b_out, mask=m_t[:, None] & m_c[None, :])


@quick_launch
@triton.jit
def causal_conv_ends_kernel(
    p_x, p_weight, p_bias, p_states, p_starts, p_counts, p_sources, p_slots, p_out, stride_x,
    C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, ACTIVATE: tl.constexpr,
):  # fmt: skip
    """Grid (R, tiles of BC channels): the first W - 1 tokens of each request, and the state that its last W - 1 are, or
    those before the end of p_counts. Older ones move to places before their own, so none is overwritten before it is
    read."""
    i_r = tl.program_id(0)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    i_start, i_end = tl.load(p_starts + i_r).to(tl.int64), tl.load(p_starts + i_r + 1).to(tl.int64)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    p_kept, m_kept = p_states + b_source * (W - 1) * C + o_c, m_c & (b_source >= 0)
    for i_t in tl.static_range(W - 1):
        m_t = m_c & (i_start + i_t < i_end)
        b_total = bias_of(p_bias, o_c, m_c)
        for i_w in tl.static_range(W):
            if i_t + i_w < W - 1:
                b_seen = tl.load(p_kept + (i_t + i_w) * C, mask=m_kept, other=0.0).to(tl.float32)
            else:
                p_seen = p_x + (i_start + (i_t + i_w - W + 1)) * stride_x + o_c
                b_seen = tl.load(p_seen, mask=m_t, other=0.0).to(tl.float32)
            b_total += b_seen * tl.load(p_weight + o_c * W + i_w, mask=m_c, other=0.0).to(tl.float32)
        b_out = activated(b_total, ACTIVATE).to(p_out.dtype.element_ty)
        tl.store(p_out + (i_start + i_t) * C + o_c, b_out, mask=m_t)
    if p_counts is not None:
        i_end = i_start + tl.load(p_counts + i_r)
    for i_w in tl.static_range(W - 1):
        i_seen = i_end + (i_w - W + 1)
        is_new = i_seen >= i_start
        b_new = tl.load(p_x + i_seen * stride_x + o_c, mask=m_c & is_new, other=0.0).to(tl.float32)
        o_kept = (i_seen - i_start + W - 1) * C
        b_kept = tl.load(p_kept + o_kept, mask=m_kept & (is_new == 0), other=0.0).to(tl.float32)
        p_left = p_states + (b_slot * (W - 1) + i_w) * C + o_c
        tl.store(p_left, (b_new + b_kept).to(p_states.dtype.element_ty), mask=m_c & (b_slot >= 0))


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    step: StateStep,
    *,
    activate: bool,
) -> torch.Tensor:
    """The same as `reference.causal_conv`."""
    (num_tokens, channels), width, num_rows = x.shape, weight.shape[1], len(step.slots)
    assert x.stride(1) == 1, "rows must be contiguous"
    assert weight.is_contiguous(), "weights must be contiguous"
    out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    tiles, sizes = cdiv(channels, _CHANNELS), {"C": channels, "W": width, "BC": _CHANNELS, "ACTIVATE": activate}
    if num_tokens == num_rows:
        causal_conv_step_kernel[(cdiv(num_tokens, _FEW_TOKENS), tiles)](
            x, weight, bias, states, step.sources, step.slots, out, num_tokens, x.stride(0),
            **sizes, BT=_FEW_TOKENS, num_warps=4,
        )  # fmt: skip
        return out
    causal_conv_kernel[(cdiv(num_tokens, _MANY_TOKENS), tiles)](
        x, weight, bias, out, num_tokens, x.stride(0), **sizes, BT=_MANY_TOKENS, num_warps=4
    )
    causal_conv_ends_kernel[(num_rows, tiles)](
        x, weight, bias, states, step.starts, step.counts, step.sources, step.slots, out, x.stride(0),
        **sizes, num_warps=4,
    )  # fmt: skip
    return out
