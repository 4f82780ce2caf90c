# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of at most four rows between layer norms on a GPU, beside those of `triton_small.py` (`OPS`): Whisper's.

One stream's decode step is bound by the way from launch to launch and by reading weights. A program here holds all of
its weight's rows at once, which are on their way before it waits for the launch before it (no kernel on the stream
writes them). Then it norms the few rows that it reads for itself, and adds bias, activation and residual to what it
writes. So a layer's norms, sums and activations are no launches. More rows are cuBLAS's, and the sum with the residual
is one launch with its norm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from app.kernels.fused import GatedActivation
from app.kernels.fused.triton_ops import activate, add_layer_norm
from app.kernels.gemm import DeferredLayerNorm, GatedRows, LayerNormOps, materialize, triton_small
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

MOST_ROWS = 4
_DTYPES = (torch.bfloat16, torch.float16)
_TILE_ELEMENTS = 16_384  # of the weight: 64 for each of a program's threads
_NUM_WARPS = 8
_LEAST_PROGRAMS = 64  # a weight of fewer tiles leaves the device idle


@quick_launch
@triton.jit
def held_linear_kernel(
    p_x, p_norm, p_norm_bias, p_weight, p_bias, p_residual, p_out, N, K, stride_x, stride_residual, eps,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N,): x [ROWS, K], layer-normed where there is p_norm [K], times rows of weight [N, K], + bias,
    then ACT, then + residual [ROWS, N]."""
    o_n, o_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_n, m_k = o_n < N, o_k < K
    b_w = tl.load(
        p_weight + o_n[:, None].to(tl.int64) * K + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0
    )  # fmt: skip
    if p_bias is not None:
        b_bias = tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    if p_norm is not None:
        b_norm = tl.load(p_norm + o_k, mask=m_k, other=0.0).to(tl.float32)
    if p_norm_bias is not None:
        b_shift = tl.load(p_norm_bias + o_k, mask=m_k, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # whose weights are then on their way, too
    for i in tl.static_range(ROWS):
        b_x = tl.load(p_x + i * stride_x + o_k, mask=m_k, other=0.0).to(tl.float32)
        if p_norm is not None:
            b_apart = tl.where(m_k, b_x - tl.sum(b_x, 0) / K, 0.0)
            b_x = b_apart * tl.rsqrt(tl.sum(b_apart * b_apart, 0) / K + eps) * b_norm
            if p_norm_bias is not None:
                b_x += b_shift
            b_x = b_x.to(p_x.dtype.element_ty).to(tl.float32)  # rounded, as a norm of its own is
        b_y = tl.sum(b_w.to(tl.float32) * b_x[None, :], 1)
        if p_bias is not None:
            b_y += b_bias
        b_y = b_y.to(p_out.dtype.element_ty).to(tl.float32)  # as where the product is written and read again
        if ACT is not None:
            b_y = activate(b_y, ACT)
        if p_residual is not None:
            b_y += tl.load(p_residual + i * stride_residual + o_n, mask=m_n, other=0.0).to(tl.float32)
        tl.store(p_out + i * N + o_n, b_y.to(p_out.dtype.element_ty), mask=m_n)


@dataclass(slots=True, frozen=True)
class HeldTile:
    """Rows of a weight that a program holds, all `depth` columns of each, padded to a power of two."""

    rows: int
    depth: int


def held_tile(num_rows: int, weight: torch.Tensor, dtype: torch.dtype) -> HeldTile | None:
    """The tile for so many rows times a weight [N, K]; None: cuBLAS."""
    depth = next_power_of_2(weight.shape[1])
    if num_rows > MOST_ROWS or dtype not in _DTYPES or depth > _TILE_ELEMENTS or not weight.is_contiguous():
        return None
    rows = _TILE_ELEMENTS // depth
    while rows > 1 and cdiv(len(weight), rows) < _LEAST_PROGRAMS:
        rows //= 2
    return HeldTile(rows, depth)


def held_linear(
    x: torch.Tensor | DeferredLayerNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: HeldTile,
    activation: GatedActivation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K], normed where its norm was deferred, times weight [N, K], transposed, + bias, the activation of it,
    + residual [T, N]."""
    rows, norm, shift, eps = (
        (x.rows, x.weight, x.bias, x.eps) if isinstance(x, DeferredLayerNorm) else (x, None, None, 0.0)
    )
    (num_rows, size), columns = rows.shape, len(weight)
    assert rows.stride(1) == 1, "rows must be contiguous"
    assert residual is None or residual.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_rows, columns, dtype=rows.dtype, device=rows.device)
    held_linear_kernel[(cdiv(columns, tile.rows),)](
        rows, norm, shift, weight, bias, residual, out, columns, size, rows.stride(0),
        0 if residual is None else residual.stride(0), eps,
        ROWS=num_rows, BN=tile.rows, BK=tile.depth, ACT=activation, num_warps=_NUM_WARPS, **early_launch(rows.device),
    )  # fmt: skip
    return out


def linear(
    x: DeferredLayerNorm, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation | None
) -> torch.Tensor:
    """See LayerNormOps."""
    tile = held_tile(len(x.rows), weight, x.rows.dtype)
    assert tile is not None, "a norm is deferred only where its readers hold its rows"
    return held_linear(x, weight, bias, tile, activation)


def linear_add_norm(
    x: GatedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    eps: float,
    may_defer: bool,
) -> tuple[torch.Tensor | DeferredLayerNorm, torch.Tensor]:
    """See LayerNormOps."""
    rows = materialize(x)
    tile = held_tile(len(rows), weight, rows.dtype)
    if tile is None:
        y = F.linear(rows, weight, bias)
        normed, summed = add_layer_norm(y, residual, norm_weight, norm_bias, eps, keeps_sum=True)
        assert summed is not None, "a sum that was to be kept"
        return normed, summed
    total = held_linear(rows, weight, bias, tile, residual=residual)
    deferred = DeferredLayerNorm(total, norm_weight, norm_bias, eps)
    # Whoever reads it has weights as wide as it is.
    may_defer = may_defer and next_power_of_2(len(weight)) <= _TILE_ELEMENTS
    return (deferred if may_defer else deferred.materialize()), total


OPS = replace(triton_small.OPS, layer_norm=LayerNormOps(linear=linear, linear_add_norm=linear_add_norm))
