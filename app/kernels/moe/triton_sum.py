# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The end of an expert layer on a GPU: a token's rows summed with their weights in a fixed order, with the output of
shared layers, the residual and the next norm, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.gemm import Activations, DeferredNorm
from app.kernels.gemm.small_tiles import may_defer_norm
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.moe import Routing
from app.kernels.quick_launch import quick_launch

MOST_DEFERRED = 64  # tokens: with more a program has a whole row, whose norm it can finish
_COLUMNS = 512  # of a program where a norm is deferred, or where there is none


@quick_launch
@triton.jit
def sum_rows_kernel(
    p_rows, p_ids, p_weights, p_shared, p_residual, p_norm, p_out, p_total, p_squares, stride_shared, stride_residual,
    eps,
    C: tl.constexpr, BC: tl.constexpr, TOP: tl.constexpr, DEFER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of C): p_total [T, C] = the sum + residual. With p_norm [C]: DEFER: p_out = p_total * p_norm and
    p_squares [T, tiles]; else, one tile, p_out = the norm. Without weights rows are summed as they are."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < C
    b_sum = tl.zeros([BC], dtype=tl.float32)
    for k in tl.static_range(TOP):
        b_id = tl.load(p_ids + i_t * TOP + k)
        b_row = tl.load(p_rows + (i_t * TOP + k) * C + o_c, mask=m_c & (b_id >= 0), other=0.0).to(tl.float32)
        if p_weights is not None:
            b_row *= tl.where(b_id >= 0, tl.load(p_weights + i_t * TOP + k), 0.0)
        b_sum += b_row
    if p_shared is not None:
        b_sum += tl.load(p_shared + i_t * stride_shared + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_total = b_sum.to(p_total.dtype.element_ty)
    if p_residual is not None:
        b_residual = tl.load(p_residual + i_t * stride_residual + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_total = (b_total.to(tl.float32) + b_residual).to(p_total.dtype.element_ty)
    tl.store(p_total + i_t * C + o_c, b_total, mask=m_c)
    if p_norm is not None:
        b_total = b_total.to(tl.float32)  # the norm is that of what is stored
        b_norm = tl.load(p_norm + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_square = tl.sum(b_total * b_total, 0)
        if DEFER:
            tl.store(p_squares + i_t * tl.num_programs(1) + i_c, b_square)
        else:
            b_total *= tl.rsqrt(b_square / C + eps)
        tl.store(p_out + i_t * C + o_c, (b_total * b_norm).to(p_out.dtype.element_ty), mask=m_c)


def _launch(
    rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None, shared: torch.Tensor | None, width: int,
    residual: torch.Tensor | None = None, norm: tuple[torch.Tensor, float] | None = None, *, defer: bool = False,
) -> tuple[Activations, torch.Tensor]:  # fmt: skip
    """(the norm, or the sum where there is none; the sum) in programs of `width` columns."""
    num_tokens, top = routing.ids.shape
    size = rows.shape[1]
    tiles = cdiv(size, width)
    assert all(t is None or t.stride(1) == 1 for t in (shared, residual)), "rows must be contiguous"
    total = torch.empty(num_tokens, size, dtype=rows.dtype, device=rows.device)
    out = total if norm is None else torch.empty_like(total)
    squares = torch.empty(num_tokens, tiles, dtype=torch.float32, device=rows.device) if defer else None
    if num_tokens > 0:
        sum_rows_kernel[(num_tokens, tiles)](
            rows, routing.ids, weights, shared, residual, norm[0] if norm else None, out, total, squares,
            shared.stride(0) if shared is not None else 0, residual.stride(0) if residual is not None else 0,
            norm[1] if norm else 0.0, C=size, BC=width, TOP=top, DEFER=defer,
            num_warps=min(max(width // 512, 1), 8), **early_launch(rows.device),
        )  # fmt: skip
    return (out if squares is None or norm is None else DeferredNorm(out, squares, norm[1])), total


def sum_rows(
    rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None, shared: torch.Tensor | None
) -> torch.Tensor:
    """rows [T * K, C] in the order of ids -> [T, C]."""
    return _launch(rows, routing, weights, shared, min(_COLUMNS, next_power_of_2(rows.shape[1])))[1]


def sum_add_norm(
    rows: torch.Tensor, routing: Routing, weights: torch.Tensor | None, shared: torch.Tensor | None,
    residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, may_defer: bool,
) -> tuple[Activations, torch.Tensor]:  # fmt: skip
    """(the norm of the sum + residual, deferred where rows are few; that sum)."""
    size = rows.shape[1]
    defer = may_defer and routing.ids.shape[0] <= MOST_DEFERRED and may_defer_norm(size, rows.dtype)
    width = _COLUMNS if defer else next_power_of_2(size)
    return _launch(rows, routing, weights, shared, width, residual, (norm_weight, eps), defer=defer)
