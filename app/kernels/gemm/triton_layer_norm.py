# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of few rows between layer norms on a GPU, beside those of `triton_small.py` (`OPS`): Whisper's, GPT-2's.

As there, a product that is added to the residual is split along K, and its
last program begins the norm that follows: here it writes what its columns add up to, and how far they lie from their
mean. The next product puts the mean and the deviation of a row together, and norms what it reads, tile by tile, so that
it multiplies the numbers that a norm of its own would have written. So three norms of a layer are no launches, and an
activation is none either.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from app.kernels.fused import GatedActivation
from app.kernels.fused.triton_ops import activate, add_layer_norm
from app.kernels.gemm import DeferredLayerNorm, GatedRows, LayerNormOps, materialize, triton_small
from app.kernels.gemm.triton_small import (
    SmallTile,
    added_tile,
    arrival_counters,
    deferred_tile,
    multiply,
    tile_options,
)
from app.kernels.launch import cdiv, next_power_of_2
from app.kernels.quick_launch import quick_launch

_FEW_COLUMNS, _NARROW = 2048, 16  # products of so few columns have narrow tiles, or half of a device would be idle
_LEAST_DEPTH = 64


@quick_launch
@triton.jit(do_not_specialize=["T"])
def normed_linear_kernel(
    p_x, p_moments, p_norm, p_norm_bias, p_weight, p_bias, p_out, T, N, K, stride_x, eps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, COLUMNS: tl.constexpr,
    ACT: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N,): layer_norm(x [T, K]) times rows of weight [N, K], + bias, then ACT. p_moments [2, T, P]: of
    every COLUMNS columns of x, the sum, and of squared distances from their mean."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    o_m, o_n, o_k = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_m, m_n = o_m[:, None] < T, o_n < N
    o_p = tl.arange(0, BP)[None, :]
    m_p = o_p < P
    b_count = tl.where(m_p, tl.minimum(K - o_p * COLUMNS, COLUMNS), 1).to(tl.float32)
    b_sums = tl.load(p_moments + o_m[:, None] * P + o_p, mask=m_m & m_p, other=0.0)
    b_squares = tl.load(p_moments + T.to(tl.int64) * P + o_m[:, None] * P + o_p, mask=m_m & m_p, other=0.0)
    b_mean = tl.sum(b_sums, 1)[:, None] / K
    b_apart = b_sums / b_count - b_mean
    b_squares += tl.where(m_p, b_count * b_apart * b_apart, 0.0)
    b_scale = tl.rsqrt(tl.sum(b_squares, 1)[:, None] / K + eps)
    p_rows = p_x + o_m[:, None] * stride_x + o_k[None, :]
    p_w = p_weight + o_n[:, None].to(tl.int64) * K + o_k[None, :]
    b_acc = tl.zeros([BM, BN], dtype=tl.float32)
    for i_k in range(0, K, BK):
        b_x = tl.load(p_rows + i_k, mask=m_m, other=0.0).to(tl.float32)
        b_norm = tl.load(p_norm + i_k + o_k).to(tl.float32)[None, :]
        b_x = (b_x - b_mean) * b_scale * b_norm
        if p_norm_bias is not None:
            b_x += tl.load(p_norm_bias + i_k + o_k).to(tl.float32)[None, :]
        if EVEN:
            b_w = tl.load(p_w + i_k)
        else:
            b_w = tl.load(p_w + i_k, mask=m_n[:, None], other=0.0)
        b_x = b_x.to(p_x.dtype.element_ty)  # rounded, as a norm of its own is
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision=PRECISION)
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if ACT is not None:
        b_acc = activate(b_acc.to(p_x.dtype.element_ty).to(tl.float32), ACT)
    p_o = p_out + o_m[:, None].to(tl.int64) * N + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_m & m_n[None, :])


@quick_launch
@triton.jit(do_not_specialize=["T"])
def linear_add_moments_kernel(
    p_x, p_weight, p_bias, p_residual, p_shares, p_arrived, p_total, p_moments, T, N, K, stride_x, stride_residual,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, SPLITS of K): p_total [T, N] = x W^T + bias + residual, and p_moments [2, T, tiles of N] of it.
    p_arrived [tiles of N] is zero before and after."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_n, i_split = tl.program_id(0), tl.program_id(1)
    o_m, o_n = tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    m_n = o_n < N
    m = (o_m[:, None] < T) & m_n[None, :]
    depth = tl.multiple_of(K // SPLITS, BK)  # else the compiler copies a few bytes at a time
    b_acc, _ = multiply(
        p_x, p_weight, o_m, o_n, i_split * depth, depth, T, N, K, stride_x, BM, BN, BK, False, EVEN, PRECISION
    )  # fmt: skip
    o = o_m[:, None].to(tl.int64) * N + o_n[None, :]
    if SPLITS > 1:
        size = T.to(tl.int64) * N
        tl.store(p_shares + i_split * size + o, b_acc, mask=m)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(p_arrived + i_n, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(p_arrived + i_n, 0)  # for the next launch
        # The own share, too, is read again: whoever is last adds up the same numbers in the same order.
        b_acc = tl.load(p_shares + o, mask=m, other=0.0, cache_modifier=".cg")
        for i in tl.static_range(1, SPLITS):
            b_acc += tl.load(p_shares + i * size + o, mask=m, other=0.0, cache_modifier=".cg")
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    b_acc = b_acc.to(p_total.dtype.element_ty).to(tl.float32)  # as where the product is written and read again
    b_residual = tl.load(p_residual + o_m[:, None] * stride_residual + o_n[None, :], mask=m, other=0.0)
    b_total = (b_acc + b_residual.to(tl.float32)).to(p_total.dtype.element_ty)
    tl.store(p_total + o, b_total, mask=m)
    if p_moments is not None:
        b_total = tl.where(m_n[None, :], b_total.to(tl.float32), 0.0)  # the norm is that of what is stored
        b_sum = tl.sum(b_total, 1)
        b_mean = b_sum / tl.minimum(N - i_n * BN, BN)
        b_apart = tl.where(m_n[None, :], b_total - b_mean[:, None], 0.0)
        o_moment, m_moment = o_m * tl.num_programs(0) + i_n, o_m < T
        tl.store(p_moments + o_moment, b_sum, mask=m_moment)
        tl.store(
            p_moments + T.to(tl.int64) * tl.num_programs(0) + o_moment, tl.sum(b_apart * b_apart, 1), mask=m_moment
        )


def normed_linear(
    x: DeferredLayerNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: SmallTile,
    activation: GatedActivation | None = None,
) -> torch.Tensor:
    """x [T, K], normed, times weight [N, K], transposed, + bias, and the activation of it: [T, N]."""
    (num_rows, size), columns = x.rows.shape, len(weight)
    num_moments = x.moments.shape[2]
    assert x.rows.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_rows, columns, dtype=x.rows.dtype, device=x.rows.device)
    normed_linear_kernel[(cdiv(columns, tile.columns),)](
        x.rows, x.moments, x.weight, x.bias, weight, bias, out, num_rows, columns, size, x.rows.stride(0), x.eps,
        P=num_moments, BP=next_power_of_2(num_moments), COLUMNS=x.columns, ACT=activation,
        **tile_options(x.rows, weight, columns, tile),
    )  # fmt: skip
    return out


def linear_add_moments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tile: SmallTile,
    with_moments: bool,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """x [T, K] times weight [N, K], transposed, + bias + residual [T, N] -> (its moments, as DeferredLayerNorm has
    them, of every `tile.columns` columns, it)."""
    (num_rows, size), columns = x.shape, len(weight)
    tiles = cdiv(columns, tile.columns)
    assert residual.stride(1) == 1, "rows must be contiguous"
    total = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    shares = arrived = moments = None
    if tile.splits > 1:
        shares = torch.empty(tile.splits, num_rows, columns, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    if with_moments:
        moments = torch.empty(2, num_rows, tiles, dtype=torch.float32, device=x.device)
    linear_add_moments_kernel[(tiles, tile.splits)](
        x, weight, bias, residual, shares, arrived, total, moments, num_rows, columns, size, x.stride(0),
        residual.stride(0), SPLITS=tile.splits, **tile_options(x, weight, columns, tile),
    )  # fmt: skip
    return moments, total


def normed_tile(num_rows: int, columns: int, size: int) -> SmallTile | None:
    """The tile for rows with a deferred layer norm."""
    tile = deferred_tile(num_rows, columns, size)
    if tile is None or columns > _FEW_COLUMNS:
        return tile
    return SmallTile(_NARROW, tile.depth, tile.num_warps, tile.num_stages)


def linear(
    x: DeferredLayerNorm, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation | None
) -> torch.Tensor:
    """See LayerNormOps."""
    tile = normed_tile(len(x.rows), *weight.shape)
    assert tile is not None, "a norm is deferred only where a tile divides its rows"
    return normed_linear(x, weight, bias, tile, activation)


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
    tile, columns = added_tile(rows, weight), len(weight)
    if tile is None:
        y = F.linear(rows, weight, bias)
        normed, sum_of_both = add_layer_norm(y, residual, norm_weight, norm_bias, eps, keeps_sum=True)
        assert sum_of_both is not None, "a sum that was to be kept"
        return normed, sum_of_both
    is_deferred = may_defer and columns % _LEAST_DEPTH == 0
    moments, total = linear_add_moments(rows, weight, bias, residual, tile, is_deferred)
    if moments is None:
        return F.layer_norm(total, norm_weight.shape, norm_weight, norm_bias, eps), total
    return DeferredLayerNorm(total, moments, tile.columns, norm_weight, norm_bias, eps), total


OPS = replace(triton_small.OPS, layer_norm=LayerNormOps(linear=linear, linear_add_norm=linear_add_norm))
