# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Convolutions over a request's last few tokens in Triton. Tokens of all requests lie in one row of tiles; where each
has one token, the launch that reads states writes them, too; else a second one does, as tiles read what it writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import StateStep
from app.kernels.recurrent.early_steps import early_step

_CHANNELS = 128  # of a tile
_FEW_TOKENS, _MANY_TOKENS = 4, 32


@quick_launch
@triton.jit(do_not_specialize=["num_tokens"])
def causal_conv_kernel(
    p_x, p_weight, p_bias, p_states, p_starts, p_sources, p_slots, p_row_of_token, p_out, num_tokens, stride_x,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, ACTIVATE: tl.constexpr,
    ONE_EACH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BT tokens, tiles of BC channels)."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_t, m_c = o_t < num_tokens, (o_c < C)[None, :]
    b_row = tl.load(p_row_of_token + o_t, mask=m_t, other=0)
    b_start = tl.load(p_starts + b_row)
    b_source = tl.load(p_sources + b_row).to(tl.int64)
    b_slot = tl.load(p_slots + b_row).to(tl.int64)
    b_total = tl.zeros([BT, BC], tl.float32)
    if p_bias is not None:
        b_total += tl.load(p_bias + o_c, mask=o_c < C, other=0.0).to(tl.float32)[None, :]
    for i_w in tl.static_range(W):
        o_seen = o_t + (i_w - W + 1)
        is_new = o_seen >= b_start
        m_new = (m_t & is_new)[:, None] & m_c
        m_kept = (m_t & (is_new == 0) & (b_source >= 0))[:, None] & m_c
        b_new = tl.load(p_x + o_seen.to(tl.int64)[:, None] * stride_x + o_c[None, :], mask=m_new, other=0.0)
        o_kept = (b_source * (W - 1) + (o_seen - b_start + W - 1)) * C
        b_kept = tl.load(p_states + o_kept[:, None] + o_c[None, :], mask=m_kept, other=0.0)
        b_seen = b_new.to(tl.float32) + b_kept.to(tl.float32)  # one of them is 0
        b_weight = tl.load(p_weight + o_c * W + i_w, mask=o_c < C, other=0.0).to(tl.float32)
        b_total += b_seen * b_weight[None, :]
        if ONE_EACH and i_w > 0:
            o_left = (b_slot * (W - 1) + i_w - 1) * C
            m_left = (m_t & (b_slot >= 0))[:, None] & m_c
            tl.store(p_states + o_left[:, None] + o_c[None, :], b_seen.to(p_states.dtype.element_ty), mask=m_left)
    if ACTIVATE:
        b_total = b_total * tl.sigmoid(b_total)
    p_tile = p_out + o_t.to(tl.int64)[:, None] * C + o_c[None, :]
    tl.store(p_tile, b_total.to(p_out.dtype.element_ty), mask=m_t[:, None] & m_c)


@quick_launch
@triton.jit
def leave_inputs_kernel(
    p_x, p_states, p_starts, p_counts, p_sources, p_slots, stride_x,
    C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (R, tiles of BC channels): the last W - 1 tokens of each request, the oldest first. Older ones move to
    places before their own, so none is overwritten before it is read."""
    i_r = tl.program_id(0)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = o_c < C
    b_start = tl.load(p_starts + i_r)
    if p_counts is None:
        b_end = tl.load(p_starts + i_r + 1)
    else:
        b_end = b_start + tl.load(p_counts + i_r)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    for i_w in tl.static_range(W - 1):
        i_seen = b_end + (i_w - W + 1)
        is_new = i_seen >= b_start
        b_new = tl.load(p_x + i_seen.to(tl.int64) * stride_x + o_c, mask=m_c & is_new, other=0.0).to(tl.float32)
        m_kept = m_c & (is_new == 0) & (b_source >= 0)
        o_kept = (b_source * (W - 1) + (i_seen - b_start + W - 1)) * C
        b_kept = tl.load(p_states + o_kept + o_c, mask=m_kept, other=0.0).to(tl.float32)
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
    one_each, tiles = num_tokens == num_rows == step.num_short, cdiv(channels, _CHANNELS)
    size = _FEW_TOKENS if one_each else _MANY_TOKENS
    causal_conv_kernel[(cdiv(num_tokens, size), tiles)](
        x, weight, bias, states, step.starts, step.sources, step.slots, step.row_of_token, out, num_tokens,
        x.stride(0), C=channels, W=width, BT=size, BC=_CHANNELS, ACTIVATE=activate, ONE_EACH=one_each, num_warps=4,
        **early_step(x.device, step),
    )  # fmt: skip
    if not one_each:
        leave_inputs_kernel[(num_rows, tiles)](
            x, states, step.starts, step.counts, step.sources, step.slots, x.stride(0),
            C=channels, W=width, BC=_CHANNELS, num_warps=4,
        )  # fmt: skip
    return out
