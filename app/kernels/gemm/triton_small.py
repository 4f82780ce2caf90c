# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of few rows (a decode step's) with a weight on a GPU, and the `OPS` that use them.

Such a product is bound by reading the weight once. What counts is that every multiprocessor has enough of it on its
way, and that nothing is launched that could ride along. Gate, up and their activation are one launch. A product that
is added to the residual stream is split along K: the program of a tile that comes last adds up the fp32 shares, in a
fixed order, and the residual. With the sums at hand it also begins the norm that follows: it writes sum * norm weight
and its tile's sum of squares, and the next product divides its result by the root of their mean (`DeferredNorm`). So a
layer's four products are four launches and its norms none. Measured against cuBLAS by
`python -m benchmarks.small_linear`.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from app.kernels.fused import GatedActivation, PlainActivation
from app.kernels.fused.reference import rms_norm
from app.kernels.fused.triton_ops import act_, act_and_mul, activate, add_rms_norm
from app.kernels.gemm import (
    Activations,
    DeferredActivation,
    DeferredNorm,
    GatedRows,
    Inputs,
    LinearOps,
    materialize,
)
from app.kernels.gemm.small_tiles import (
    FEW_COLUMNS,
    LEAST_DEPTH,
    SmallTile,
    activated_tile,
    added_tile,
    may_defer_norm,
    plain_tile,
    stages_within,
    tile_to_hold,
)
from app.kernels.gemm.triton_held import held_linear
from app.kernels.gemm.triton_low_rank import LowRankRows, add_low_rank, arguments, constants, first_jobs
from app.kernels.launch import cdiv, early_launch, next_power_of_2, shared_memory
from app.kernels.quick_launch import quick_launch

_MOST_TILES = 4096  # column tiles, in a product that is split


@triton.jit
def multiply(
    p_x, p_weight, o_m, o_n, start, depth, T, N, K, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN]: rows o_m of x times rows o_n of the weight, `depth` of K from `start`; gated: and N + o_n."""
    m_m, m_n, o_k = o_m[:, None] < T, o_n[:, None] < N, start + tl.arange(0, BK)
    p_rows = p_x + o_m[:, None] * stride_x + o_k[None, :]
    p_w = p_weight + o_n[:, None].to(tl.int64) * K + o_k[None, :]
    o_up = tl.cast(N, tl.int64) * K  # an N of 1 is a constant, which has no `to`
    b_acc = tl.zeros([BM, BN], dtype=tl.float32)
    b_up = tl.zeros([BM, BN], dtype=tl.float32)
    for i_k in range(0, depth, BK):
        b_x = tl.load(p_rows + i_k, mask=m_m, other=0.0)
        if EVEN:
            b_w = tl.load(p_w + i_k)
        else:
            b_w = tl.load(p_w + i_k, mask=m_n, other=0.0)
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision=PRECISION)
        if GATED:
            if EVEN:
                b_w = tl.load(p_w + o_up + i_k)
            else:
                b_w = tl.load(p_w + o_up + i_k, mask=m_n, other=0.0)
            b_up = tl.dot(b_x, tl.trans(b_w), b_up, input_precision=PRECISION)
    return b_acc, b_up


@quick_launch
@triton.jit(do_not_specialize=["T"])
def small_linear_kernel(
    p_x, p_weight, p_bias, p_squares, p_out, T, N, K, stride_x, eps,
    p_hidden, p_slots, p_jobs, num_jobs, p_second, stride_slot, stride_tile, end_0, end_1, end_2,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, BR: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, LEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N,): x [T, K] times rows of weight [N or 2 N, K]; p_squares [T, P]: divided by the rows' RMS.
    p_hidden: low-rank products are added, of which the kernel before computes the first half, and reads x itself."""
    if EARLY and p_hidden is None:
        tl.extra.cuda.gdc_wait()
        if LEADS:  # most of the device is the next kernel's
            tl.extra.cuda.gdc_launch_dependents()
    o_m, o_n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    if p_hidden is not None:
        count, b_row, b_slot, b_tile = first_jobs(o_m, T, p_slots, p_jobs, num_jobs, BR)
    m_m, m_n = o_m[:, None] < T, o_n < N
    if p_squares is not None:  # before the loop, so that they are on their way with the weight
        o_p = tl.arange(0, BP)[None, :]
        b_squares = tl.load(p_squares + o_m[:, None] * P + o_p, mask=m_m & (o_p < P), other=0.0)
        b_scale = tl.rsqrt(tl.sum(b_squares, 1)[:, None] / K + eps)
    b_acc, b_up = multiply(
        p_x, p_weight, o_m, o_n, 0, K, T, N, K, stride_x, BM, BN, BK, GATED, EVEN, PRECISION
    )  # fmt: skip
    if p_squares is not None:
        b_acc *= b_scale
        b_up *= b_scale
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            b_up += tl.load(p_bias + N + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if p_hidden is not None:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        i_n = tl.program_id(0) * BN
        b_acc = add_low_rank(
            b_acc, o_m, o_n, m_n, i_n, count, b_row, b_slot, b_tile, p_hidden, p_jobs, num_jobs, p_second, stride_slot,
            stride_tile, end_0, end_1, end_2, PARTS, RANKS, BR, PRECISION,
        )  # fmt: skip
        if GATED:
            b_up = add_low_rank(
                b_up, o_m, N + o_n, m_n, N + i_n, count, b_row, b_slot, b_tile, p_hidden, p_jobs, num_jobs, p_second,
                stride_slot, stride_tile, end_0, end_1, end_2, PARTS, RANKS, BR, PRECISION,
            )  # fmt: skip
    if GATED:
        # Rounded in between, as where the two are written and read again.
        b_acc = b_acc.to(p_x.dtype.element_ty).to(tl.float32)
        b_acc = activate(b_acc, ACT) * b_up.to(p_x.dtype.element_ty).to(tl.float32)
    elif ACT is not None:
        b_acc = activate(b_acc.to(p_x.dtype.element_ty).to(tl.float32), ACT)
    p_o = p_out + o_m[:, None].to(tl.int64) * N + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_m & m_n[None, :])


@triton.jit
def leave_share(b_acc, p_share, m, p_arrived, i_n):
    """Store a program's share of a product that is split along K; returns how many of its tile were there before."""
    tl.store(p_share, b_acc, mask=m)
    tl.debug_barrier()  # all threads have stored before one of them says so
    return tl.atomic_add(p_arrived + i_n, 1, sem="acq_rel")


@triton.jit
def sum_of_shares(p_shares, o, m, size, p_arrived, i_n, SPLITS: tl.constexpr):
    """fp32 [BM, BN]: all of a tile's shares, which lie `size` apart, for the last of its programs. The own one, too, is
    read again: whoever is last adds up the same numbers in the same order."""
    tl.debug_barrier()
    tl.store(p_arrived + i_n, 0)  # for the next launch
    b_sum = tl.load(p_shares + o, mask=m, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, SPLITS):
        b_sum += tl.load(p_shares + i * size + o, mask=m, other=0.0, cache_modifier=".cg")
    return b_sum


@quick_launch
@triton.jit(do_not_specialize=["T"])
def small_linear_add_kernel(
    p_x, p_weight, p_bias, p_residual, p_norm, p_shares, p_arrived, p_total, p_rows, p_squares, T, N, K, stride_x,
    stride_residual, p_hidden, p_slots, p_jobs, num_jobs, p_second, stride_slot, stride_tile, end_0, end_1, end_2,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    RANKS: tl.constexpr, BR: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, SPLITS of K): p_total [T, N] = x W^T + bias + residual; with p_norm [N] p_rows [T, N] =
    p_total * p_norm and p_squares [T, tiles of N]. p_arrived [tiles of N] is zero before and after. p_hidden: as in
    small_linear_kernel."""
    if EARLY and p_hidden is None:
        tl.extra.cuda.gdc_wait()
    i_n, i_split = tl.program_id(0), tl.program_id(1)
    o_m, o_n = tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    if p_hidden is not None:
        count, b_row, b_slot, b_tile = first_jobs(o_m, T, p_slots, p_jobs, num_jobs, BR)
    m_n = o_n < N
    m = (o_m[:, None] < T) & m_n[None, :]
    depth = tl.multiple_of(K // SPLITS, BK)  # else the compiler copies a few bytes at a time
    b_acc, _ = multiply(
        p_x, p_weight, o_m, o_n, i_split * depth, depth, T, N, K, stride_x, BM, BN, BK, False, EVEN, PRECISION
    )  # fmt: skip
    o = o_m[:, None].to(tl.int64) * N + o_n[None, :]
    if SPLITS > 1:
        size = T.to(tl.int64) * N
        if leave_share(b_acc, p_shares + i_split * size + o, m, p_arrived, i_n) < SPLITS - 1:
            return
        b_acc = sum_of_shares(p_shares, o, m, size, p_arrived, i_n, SPLITS)
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if p_hidden is not None:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        b_acc = add_low_rank(
            b_acc, o_m, o_n, m_n, i_n * BN, count, b_row, b_slot, b_tile, p_hidden, p_jobs, num_jobs, p_second,
            stride_slot, stride_tile, end_0, end_1, end_2, PARTS, RANKS, BR, PRECISION,
        )  # fmt: skip
    b_acc = b_acc.to(p_total.dtype.element_ty).to(tl.float32)  # as where the product is written and read again
    b_residual = tl.load(p_residual + o_m[:, None] * stride_residual + o_n[None, :], mask=m, other=0.0)
    b_total = (b_acc + b_residual.to(tl.float32)).to(p_total.dtype.element_ty)
    tl.store(p_total + o, b_total, mask=m)
    if p_norm is not None:
        b_total = b_total.to(tl.float32)  # the norm is that of what is stored
        b_norm = tl.load(p_norm + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
        tl.store(p_rows + o, (b_total * b_norm).to(p_rows.dtype.element_ty), mask=m)
        b_total = tl.where(m_n[None, :], b_total, 0.0)
        tl.store(p_squares + o_m * tl.num_programs(0) + i_n, tl.sum(b_total * b_total, 1), mask=o_m < T)


def arrival_counters(device: torch.device, user: str = "") -> torch.Tensor:
    """Zeros, int32 [_MOST_TILES], that the split products of a stream count in, one after another, and leave zero.
    `user`: one whose launches may overlap with those of others, and so has zeros of its own.

    A graph counts in those of the stream it was captured on, so graphs must be replayed one after another, as they are
    on the one stream that a process computes on.
    """
    return _counters_of(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0, user)


@cache
def _counters_of(device: torch.device, stream: int, user: str) -> torch.Tensor:
    # Made in a capture, they would be zero only once that graph was replayed.
    assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), "run once before capturing"
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def small_linear(
    x: Activations,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: SmallTile,
    activation: PlainActivation | None = None,
    low_rank: LowRankRows | None = None,
    *,
    is_gated: bool = False,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] (gated: gate and up, [2 N, K]) transposed, and its activation: [T, N]. `low_rank` is
    added; the launch before is the one that computes its first half."""
    assert tile.splits == 1, tile
    rows, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, 0.0)
    num_rows, size = rows.shape
    columns = weight.shape[0] // 2 if is_gated else weight.shape[0]
    num_squares = 1 if squares is None else squares.shape[1]
    out = torch.empty(num_rows, columns, dtype=rows.dtype, device=rows.device)
    small_linear_kernel[(cdiv(columns, tile.columns),)](
        rows, weight, bias, squares, out, num_rows, columns, size, rows.stride(0), eps, *arguments(low_rank),
        P=num_squares, BP=next_power_of_2(num_squares), GATED=is_gated, ACT=activation, LEADS=columns <= FEW_COLUMNS,
        **constants(low_rank), **launch_options(rows, weight, columns, tile),
    )  # fmt: skip
    return out


def small_linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tile: SmallTile,
    norm: tuple[torch.Tensor, float] | None = None,
    low_rank: LowRankRows | None = None,
) -> tuple[DeferredNorm | None, torch.Tensor]:
    """x [T, K] times weight [N, K], transposed, + residual [T, N] -> (its norm by (weight [N], eps), it). `low_rank`:
    as in small_linear."""
    num_rows, size = x.shape
    columns, tiles = weight.shape[0], cdiv(weight.shape[0], tile.columns)
    assert size % (tile.depth * tile.splits) == 0, (size, tile)
    assert residual.stride(1) == 1, "rows must be contiguous"
    assert tiles <= _MOST_TILES, (columns, tile)
    total = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    shares = arrived = deferred = None
    if tile.splits > 1:
        shares = torch.empty(tile.splits, num_rows, columns, dtype=torch.float32, device=x.device)
        arrived = arrival_counters(x.device)
    if norm is not None:
        squares = torch.empty(num_rows, tiles, dtype=torch.float32, device=x.device)
        deferred = DeferredNorm(torch.empty_like(total), squares, norm[1])
    small_linear_add_kernel[(tiles, tile.splits)](
        x, weight, bias, residual, norm[0] if norm else None, shares, arrived, total,
        deferred.rows if deferred else None,
        deferred.squares if deferred else None, num_rows, columns, size, x.stride(0), residual.stride(0),
        *arguments(low_rank), SPLITS=tile.splits, **constants(low_rank), **launch_options(x, weight, columns, tile),
    )  # fmt: skip
    return deferred, total


def launch_options(x: torch.Tensor, weight: torch.Tensor, columns: int, tile: SmallTile) -> dict[str, int | bool | str]:
    """Constants and options of a kernel of products of few rows by such a tile."""
    size, height = x.shape[1], max(16, next_power_of_2(x.shape[0]))
    assert size % tile.depth == 0, (size, tile)
    assert x.stride(1) == weight.stride(1) == 1, "rows must be contiguous"
    assert weight.stride(0) == size, "the weight must be contiguous"
    num_weights = weight.shape[0] // columns
    stages = stages_within(shared_memory(x.device), tile, height, num_weights, x.element_size())
    return {
        "BM": height, "BN": tile.columns, "BK": tile.depth,
        "EVEN": columns % tile.columns == 0, "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": tile.num_warps, "num_stages": stages, **early_launch(x.device),
    }  # fmt: skip


def add_and_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tile: SmallTile,
    norm: tuple[torch.Tensor, float],
    may_defer: bool,
    low_rank: LowRankRows | None = None,
) -> tuple[Activations, torch.Tensor]:
    """`linear_add_norm` by such a tile."""
    # GPT-OSS's 2,880 too: its gate and experts read them, and a norm of its own takes 4.9 us.
    is_deferred = may_defer and may_defer_norm(weight.shape[0], x.dtype, LEAST_DEPTH)
    deferred, total = small_linear_add(x, weight, bias, residual, tile, norm if is_deferred else None, low_rank)
    return deferred or rms_norm(total, *norm), total


def linear(x: Inputs, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `reference.linear`."""
    x = x.materialize() if isinstance(x, DeferredActivation) else x
    if (tile := plain_tile(x, weight)) is not None:
        return small_linear(x, weight, bias, tile)
    rows = materialize(x)
    held = tile_to_hold(rows, weight)
    return F.linear(rows, weight, bias) if held is None else held_linear(rows, weight, bias, held)


def gated_linear(
    x: Activations, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """The same as `reference.OPS.gated_linear`."""
    tile = activated_tile(x, weight)
    if tile is None:
        return act_and_mul(F.linear(materialize(x), weight, bias), activation)
    return small_linear(x, weight, bias, tile, activation, is_gated=True)


def activated_linear(
    x: Inputs, weight: torch.Tensor, bias: torch.Tensor | None, activation: PlainActivation
) -> torch.Tensor:
    """The activation of `linear`."""
    x = x.materialize() if isinstance(x, DeferredActivation) else x
    if (tile := plain_tile(x, weight)) is not None:
        return small_linear(x, weight, bias, tile, activation)
    rows = materialize(x)
    held = tile_to_hold(rows, weight)
    if held is None:
        return act_(F.linear(rows, weight, bias), activation)
    return held_linear(rows, weight, bias, held, activation)


def linear_add(
    x: Inputs, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor | None:
    """See SummedProduct."""
    rows = materialize(x)
    held = tile_to_hold(rows, weight)
    return None if held is None else held_linear(rows, weight, bias, held, residual=residual)


def linear_add_norm(
    x: GatedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    may_defer: bool,
) -> tuple[Activations, torch.Tensor]:
    """The same as `reference.OPS.linear_add_norm`, but the norm may be deferred."""
    x = materialize(x)
    tile = added_tile(x, weight)
    if tile is None:
        return add_rms_norm(F.linear(x, weight, bias), residual, norm_weight, eps)
    return add_and_norm(x, weight, bias, residual, tile, (norm_weight, eps), may_defer)


OPS = LinearOps(
    linear=linear,
    gated_linear=gated_linear,
    linear_add_norm=linear_add_norm,
    activated_linear=activated_linear,
    linear_add=linear_add,
)
