# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Does what latent attention needs between its projections, in one launch: norm, rotation, write into the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.attention.triton_quantize import quantize
from app.kernels.fused import LatentRotation
from app.kernels.launch import ROUNDS_PRODUCTS, cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

# Elements of one program's heads; the same for any number of tokens, so that a result has the same bits (I6).
_HEADS_TILE_ELEMENTS = 1024


@triton.jit
def rotated(p_row, p_cos, p_sin, o_d, m, m_d, DR: tl.constexpr, PAIRS: tl.constexpr):
    """Rows of Dr numbers, rotated, fp32: those of each pair's first before those of its second."""
    o_other = tl.where(o_d < DR // 2, o_d + DR // 2, o_d - DR // 2)
    if PAIRS:  # number d of what comes out was at 2 d, or at 2 (d - Dr / 2) + 1
        o_own = tl.where(o_d < DR // 2, 2 * o_d, 2 * o_d - DR + 1)
        o_other = tl.where(o_d < DR // 2, 2 * o_d + 1, 2 * o_d - DR)
    else:
        o_own = o_d
    b_own = tl.load(p_row + o_own, mask=m, other=0.0).to(tl.float32)
    b_other = tl.load(p_row + o_other, mask=m, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + o_d, mask=m_d, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_d, mask=m_d, other=0.0).to(tl.float32)
    return b_own * b_cos + b_other * b_sin


@quick_launch
@triton.jit
def rotate_and_write_latent_kernel(
    p_query, p_latent, p_cos, p_sin, p_weight, p_cache, p_scale, p_slots, p_out, eps,
    stride_query_token, stride_query_head, stride_latent, stride_angle, stride_block, stride_slot,
    stride_out_token, stride_out_head,
    H: tl.constexpr, R: tl.constexpr, DR: tl.constexpr, S: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, PAIRS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T, 1 + tiles of BH heads): the first program of a token has its latent, the others its queries."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t = tl.program_id(0).to(tl.int64)
    i_tile = tl.program_id(1) - 1
    o_d = tl.arange(0, BD)[None, :]
    m_d = o_d < DR
    p_cos += i_t * stride_angle
    p_sin += i_t * stride_angle
    if i_tile >= 0:
        o_h = i_tile * BH + tl.arange(0, BH)[:, None]
        m = (o_h < H) & m_d
        p_row = p_query + i_t * stride_query_token + o_h * stride_query_head
        b_y = rotated(p_row, p_cos, p_sin, o_d, m, m_d, DR, PAIRS)
        tl.debug_barrier()  # `out` may be `query`: all of the tile is read before any of it is written
        tl.store(p_out + i_t * stride_out_token + o_h * stride_out_head + o_d, b_y.to(p_out.dtype.element_ty), mask=m)
        return
    b_slot = tl.load(p_slots + i_t)
    if b_slot < 0:
        return
    o_r = tl.arange(0, BR)[None, :]
    m_r = o_r < R
    p_row = p_latent + i_t * stride_latent
    b_x = tl.load(p_row + o_r, mask=m_r, other=0.0).to(tl.float32)
    b_rms = tl.rsqrt(tl.sum(b_x * b_x, 1)[:, None] / R + eps)
    b_x = b_x * b_rms * tl.load(p_weight + o_r, mask=m_r, other=0.0).to(tl.float32)
    b_y = rotated(p_row + R, p_cos, p_sin, o_d, m_d, m_d, DR, PAIRS)
    p_slot = p_cache + b_slot // S * stride_block + b_slot % S * stride_slot
    if p_scale is not None:
        b_scale = tl.load(p_scale + tl.arange(0, 1))[:, None]
        tl.store(p_slot + o_r, quantize(b_x, b_scale, p_cache.dtype.element_ty), mask=m_r)
        tl.store(p_slot + R + o_d, quantize(b_y, b_scale, p_cache.dtype.element_ty), mask=m_d)
    else:
        tl.store(p_slot + o_r, b_x.to(p_cache.dtype.element_ty), mask=m_r)
        tl.store(p_slot + R + o_d, b_y.to(p_cache.dtype.element_ty), mask=m_d)


def rotate_and_write_latent(
    query: torch.Tensor,
    latent: torch.Tensor,
    rotation: LatentRotation,
    cache: torch.Tensor,
    slots: torch.Tensor,
    scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The same as `reference.rotate_and_write_latent`."""
    num_tokens, num_heads, dim = query.shape
    cos, sin = rotation.cos, rotation.sin
    assert query.stride(2) == latent.stride(1) == cache.stride(2) == out.stride(2) == 1, "rows must be contiguous"
    assert cos.stride() == sin.stride(), "cos and sin must lie alike"
    if num_tokens == 0:
        return
    size, padded = latent.shape[1] - dim, next_power_of_2(dim)
    tile = min(_HEADS_TILE_ELEMENTS // padded, next_power_of_2(num_heads))
    rotate_and_write_latent_kernel[(num_tokens, 1 + cdiv(num_heads, tile))](
        query, latent, cos, sin, rotation.norm_weight, cache, scale, slots, out, rotation.eps,
        *query.stride()[:2], latent.stride(0), cos.stride(0), *cache.stride()[:2], *out.stride()[:2],
        H=num_heads, R=size, DR=dim, S=cache.shape[1], BH=tile, BR=next_power_of_2(size), BD=padded,
        PAIRS=rotation.interleaved, num_warps=4, **ROUNDS_PRODUCTS, **early_launch(query.device),
    )  # fmt: skip
