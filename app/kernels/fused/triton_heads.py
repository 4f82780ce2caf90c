# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Queries and keys rotated where a product has left them, of models that keep no cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.attention import HeadNorm
from app.kernels.launch import ROUNDS_PRODUCTS, cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

# Numbers of one program; the same for any number of tokens, so that a norm has the same bits (I6).
_TILE = 4096


@quick_launch
@triton.jit
def rotate_heads_kernel(
    p_heads, p_cos, p_sin, p_query_weight, p_key_weight, eps, stride_token, stride_head, stride_angle,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr,
    BU: tl.constexpr, USE_NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of BH heads): one token's heads, the two halves that rotate, each of R numbers, side by side, and
    the D - DR numbers behind them that only a norm changes."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    R: tl.constexpr = DR // 2
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    o_r = tl.arange(0, BR)[None, :]
    m_r = o_r < R
    m = (o_h < H) & m_r
    p_left = p_heads + i_t * stride_token + o_h * stride_head + o_r
    b_left = tl.load(p_left, mask=m, other=0.0).to(tl.float32)
    b_right = tl.load(p_left + R, mask=m, other=0.0).to(tl.float32)
    p_angle = i_t * stride_angle + o_r
    b_cos_left = tl.load(p_cos + p_angle, mask=m_r, other=0.0).to(tl.float32)
    b_cos_right = tl.load(p_cos + p_angle + R, mask=m_r, other=0.0).to(tl.float32)
    b_sin_left = tl.load(p_sin + p_angle, mask=m_r, other=0.0).to(tl.float32)
    b_sin_right = tl.load(p_sin + p_angle + R, mask=m_r, other=0.0).to(tl.float32)
    if USE_NORM:
        is_query = o_h < HQ
        b_squares = tl.sum(b_left * b_left, 1) + tl.sum(b_right * b_right, 1)
        if D > DR:
            o_u = DR + tl.arange(0, BU)[None, :]
            m_u = (o_h < H) & (o_u < D)
            p_rest = p_heads + i_t * stride_token + o_h * stride_head + o_u
            b_rest = tl.load(p_rest, mask=m_u, other=0.0).to(tl.float32)
            b_squares += tl.sum(b_rest * b_rest, 1)
        b_rms = tl.rsqrt(b_squares[:, None] / D + eps)
        b_query = tl.load(p_query_weight + o_r, mask=m_r, other=0.0).to(tl.float32)
        b_key = tl.load(p_key_weight + o_r, mask=m_r, other=0.0).to(tl.float32)
        b_left = b_left * b_rms * tl.where(is_query, b_query, b_key)
        b_query = tl.load(p_query_weight + R + o_r, mask=m_r, other=0.0).to(tl.float32)
        b_key = tl.load(p_key_weight + R + o_r, mask=m_r, other=0.0).to(tl.float32)
        b_right = b_right * b_rms * tl.where(is_query, b_query, b_key)
        if D > DR:
            b_query = tl.load(p_query_weight + o_u, mask=o_u < D, other=0.0).to(tl.float32)
            b_key = tl.load(p_key_weight + o_u, mask=o_u < D, other=0.0).to(tl.float32)
            b_rest = b_rest * b_rms * tl.where(is_query, b_query, b_key)
            tl.store(p_rest, b_rest.to(p_heads.dtype.element_ty), mask=m_u)
    b_out = b_left * b_cos_left + b_right * b_sin_left
    tl.store(p_left, b_out.to(p_heads.dtype.element_ty), mask=m)
    b_out = b_right * b_cos_right + b_left * b_sin_right
    tl.store(p_left + R, b_out.to(p_heads.dtype.element_ty), mask=m)


def rotate_heads(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: HeadNorm | None, num_queries: int
) -> None:
    """The same as `Composed.rotate_heads`."""
    num_tokens, num_heads, head_dim = heads.shape
    assert heads.stride(2) == cos.stride(2) == 1, "heads and angles must be contiguous"
    assert cos.stride() == sin.stride(), "cos and sin must lie alike"
    if num_tokens == 0:
        return
    rotary_dim, padded = cos.shape[2], next_power_of_2(head_dim)
    tile = min(max(_TILE // padded, 1), next_power_of_2(num_heads))
    query_weight, key_weight = (norm.query_weight, norm.key_weight) if norm is not None else (heads, heads)
    rotate_heads_kernel[(num_tokens, cdiv(num_heads, tile))](
        heads, cos, sin, query_weight, key_weight, norm.eps if norm is not None else 0.0,
        heads.stride(0), heads.stride(1), cos.stride(0),
        HQ=num_queries, H=num_heads, D=head_dim, DR=rotary_dim, BH=tile, BR=next_power_of_2(rotary_dim // 2),
        BU=next_power_of_2(max(head_dim - rotary_dim, 1)), USE_NORM=norm is not None,
        num_warps=max(1, min(4, tile * padded // 1024)), **ROUNDS_PRODUCTS, **early_launch(heads.device),
    )  # fmt: skip
