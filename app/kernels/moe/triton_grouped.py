# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Grouped products on a GPU: the rows of each expert times that expert's weight, rows gathered by index.

A pair is a token and one of its experts, t * K + k. Two kernels find the pairs of a tile in two ways. Where pairs are
few, each program looks through all ids for its expert's (`scan_product_kernel`): no sort before it, each weight is read
once. Where they are many, they come sorted by expert, with a list of tiles (`triton_sort.py`), and programs work
through the list (`sorted_product_kernel`). In both a tile is the same (`expert_tile`): gate and up with their
activation in one go, or a plain product; the norm that a `DeferredNorm` left out and biases ride along. With few rows
the weight is the side of a product that a Hopper's tensor cores take 64 rows of (`swap`), and tokens the narrow side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from app.kernels.fused.triton_ops import activate
from app.kernels.gemm import Activations, DeferredNorm
from app.kernels.launch import cdiv, early_launch, multiprocessors, next_power_of_2, shared_memory
from app.kernels.moe import GLU
from app.kernels.moe.triton_sort import SortedPairs


@dataclass(slots=True, frozen=True)
class GroupedTile:
    """Tile sizes and launch options of a grouped product."""

    rows: int
    columns: int  # of gate and up: so many of each
    depth: int
    num_warps: int
    num_stages: int
    swap: bool = False  # weight times tokens, instead of tokens times weight
    tma: bool = False  # the weight's tiles come by the tensor memory accelerator
    programs: int = 0  # of a persistent grid, for each multiprocessor; 0: a program a tile


@triton.jit
def gated(b_gate, b_up, limit, alpha, up_offset, ACT: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """The gated activation of fp32 numbers (`GLU`)."""
    if HAS_LIMIT:
        b_gate = tl.minimum(b_gate, limit)
        b_up = tl.minimum(tl.maximum(b_up, -limit), limit)
    if ACT == "silu":
        b_gate = b_gate * tl.sigmoid(alpha * b_gate)
    else:
        b_gate = activate(b_gate, ACT)
    return b_gate * (b_up + up_offset)


@triton.jit
def load_weight(weight, row, o_n, i_k, o_k, N, K, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
                EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):  # fmt: skip
    """[BN, BK] of a weight [.., K], rows from `row`, of which o_n counts those within its expert's N."""
    if TMA:
        b_w = weight.load([row, i_k])
    else:
        p_w = weight + (row.to(tl.int64) + tl.arange(0, BN)[:, None]) * K + (i_k + o_k)[None, :]
        if EVEN_N and EVEN_K:
            b_w = tl.load(p_w)
        else:
            b_w = tl.load(p_w, mask=(o_n[:, None] < N) & ((i_k + o_k)[None, :] < K), other=0.0)
    return b_w


@triton.jit
def expert_tile(
    p_x, weight, p_bias, p_squares, p_weights, p_out, i_e, i_n, b_row, b_pair, b_out, m_m, N, K, stride_x, eps,
    limit, alpha, up_offset,
    P: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_LIMIT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows b_row [BM] of x times columns i_n of expert i_e's weight into rows b_out; m_m: which there are."""
    o_n, o_k = i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_n = o_n < N
    first = i_e * (2 * N if GATED else N) + i_n * BN
    p_rows = p_x + b_row[:, None].to(tl.int64) * stride_x + o_k[None, :]
    if SWAP:
        b_acc = tl.zeros([BN, BM], dtype=tl.float32)
        b_up = tl.zeros([BN, BM], dtype=tl.float32)
    else:
        b_acc = tl.zeros([BM, BN], dtype=tl.float32)
        b_up = tl.zeros([BM, BN], dtype=tl.float32)
    for i_k in range(0, K, BK):
        if EVEN_K:
            b_x = tl.load(p_rows + i_k, mask=m_m[:, None], other=0.0)
        else:
            b_x = tl.load(p_rows + i_k, mask=m_m[:, None] & (i_k + o_k < K)[None, :], other=0.0)
        b_w = load_weight(weight, first, o_n, i_k, o_k, N, K, BN, BK, TMA, EVEN_N, EVEN_K)
        if SWAP:
            b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision=PRECISION)
        else:
            b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision=PRECISION)
        if GATED:
            b_w = load_weight(weight, first + N, o_n, i_k, o_k, N, K, BN, BK, TMA, EVEN_N, EVEN_K)
            if SWAP:
                b_up = tl.dot(b_w, tl.trans(b_x), b_up, input_precision=PRECISION)
            else:
                b_up = tl.dot(b_x, tl.trans(b_w), b_up, input_precision=PRECISION)
    if SWAP:
        b_acc = tl.trans(b_acc)
        b_up = tl.trans(b_up)
    if p_squares is not None:
        o_p = tl.arange(0, BP)[None, :]
        b_squares = tl.load(p_squares + b_row[:, None] * P + o_p, mask=m_m[:, None] & (o_p < P), other=0.0)
        b_scale = tl.rsqrt(tl.sum(b_squares, 1) / K + eps)[:, None]
        b_acc *= b_scale
        b_up *= b_scale
    if p_weights is not None:
        b_scale = tl.load(p_weights + b_pair, mask=m_m, other=0.0)[:, None]
        b_acc *= b_scale
        b_up *= b_scale
    if p_bias is not None:
        p_b = p_bias + i_e * (2 * N if GATED else N) + o_n
        b_acc += tl.load(p_b, mask=m_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            b_up += tl.load(p_b + N, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        b_acc = gated(b_acc, b_up, limit, alpha, up_offset, ACT, HAS_LIMIT)
    p_o = p_out + b_out[:, None].to(tl.int64) * N + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def scan_product_kernel(
    p_x, weight, p_bias, p_squares, p_weights, p_ids, p_out, num_pairs, N, K, stride_x, eps, limit, alpha, up_offset,
    DIV: tl.constexpr, BPAIRS: tl.constexpr, BY_PAIR: tl.constexpr,
    P: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_LIMIT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, experts) or, BY_PAIR, (tiles of N, pairs), where the first of an expert's pairs does all. x has
    a row for DIV pairs."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_n, i_e = tl.program_id(0), tl.program_id(1)
    o_pair = tl.arange(0, BPAIRS)
    b_ids = tl.load(p_ids + o_pair, mask=o_pair < num_pairs, other=-1)
    if BY_PAIR:
        i_pair = i_e
        i_e = tl.load(p_ids + i_pair)
        if (i_e < 0) | (tl.min(tl.where(b_ids == i_e, o_pair, BPAIRS), 0) < i_pair):
            return
    m_mine = b_ids == i_e
    b_rank = tl.cumsum(m_mine.to(tl.int32), 0) - 1
    count = tl.sum(m_mine.to(tl.int32), 0)
    for start in range(0, count, BM):
        o_m = start + tl.arange(0, BM)
        m_hit = m_mine[None, :] & (b_rank[None, :] == o_m[:, None])
        b_pair = tl.sum(tl.where(m_hit, o_pair[None, :], 0), 1)
        expert_tile(
            p_x, weight, p_bias, p_squares, p_weights, p_out, i_e, i_n, b_pair // DIV, b_pair, b_pair, o_m < count,
            N, K, stride_x, eps, limit, alpha, up_offset, P, BP, BM, BN, BK, GATED, ACT, HAS_LIMIT, SWAP, TMA,
            EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["MOST_TILES"])
def sorted_product_kernel(
    p_x, weight, p_bias, p_squares, p_weights, p_order, p_tiles, p_num_tiles, p_out, N, K, stride_x, eps, limit, alpha,
    up_offset, MOST_TILES,
    DIV: tl.constexpr, X_SORTED: tl.constexpr, OUT_SORTED: tl.constexpr,
    P: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_LIMIT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (programs,), which share the tiles: all columns of one tile of rows before the next, so that neighbours read
    the same rows and the same expert. p_tiles [3, MOST_TILES]: expert, first place in the order, number of rows."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tiles_n = tl.cdiv(N, BN)
    num_tiles = tl.load(p_num_tiles) * tiles_n
    for i in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        i_tile, i_n = i // tiles_n, i % tiles_n
        i_e = tl.load(p_tiles + i_tile)
        start = tl.load(p_tiles + MOST_TILES + i_tile)
        o_m = tl.arange(0, BM)
        m_m = o_m < tl.load(p_tiles + 2 * MOST_TILES + i_tile)
        b_pair = tl.load(p_order + start + o_m, mask=m_m, other=0)
        b_row = start + o_m if X_SORTED else b_pair // DIV
        b_out = start + o_m if OUT_SORTED else b_pair
        expert_tile(
            p_x, weight, p_bias, p_squares, p_weights, p_out, i_e, i_n, b_row, b_pair, b_out, m_m,
            N, K, stride_x, eps, limit, alpha, up_offset, P, BP, BM, BN, BK, GATED, ACT, HAS_LIMIT, SWAP, TMA,
            EVEN_N, EVEN_K, PRECISION,
        )  # fmt: skip


@dataclass(slots=True, frozen=True)
class Product:
    """One of the two grouped products of a layer: its weight and what rides along."""

    weight: torch.Tensor  # [E, N or 2 N, K]
    bias: torch.Tensor | None  # [E, N or 2 N]
    activation: GLU | None = None  # gate and up, with their activation
    pair_weights: torch.Tensor | None = None  # fp32 [T, K]: multiply the rows before biases

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.weight.shape[1] // 2 if self.activation else self.weight.shape[1]

    def arguments(self, x: Activations, tile: GroupedTile) -> dict[str, Any]:
        """What both kernels take."""
        rows, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, 0.0)
        num_squares = 1 if squares is None else squares.shape[1]
        glu, size = self.activation or GLU(), self.weight.shape[2]
        assert rows.stride(1) == 1, "rows must be contiguous"
        assert self.weight.is_contiguous()
        weight = self.weight
        if tile.tma:
            assert size * weight.element_size() % 16 == 0, "rows of the weight must begin at multiples of 16 bytes"
            weight = TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.columns, tile.depth])
        return {
            "p_x": rows, "weight": weight, "p_bias": self.bias, "p_squares": squares, "p_weights": self.pair_weights,
            "N": self.columns, "K": size, "stride_x": rows.stride(0), "eps": eps,
            "limit": glu.limit or 0.0, "alpha": glu.alpha, "up_offset": glu.up_offset,
            "P": num_squares, "BP": next_power_of_2(num_squares), "BM": tile.rows, "BN": tile.columns,
            "BK": tile.depth, "GATED": self.activation is not None, "ACT": glu.function,
            "HAS_LIMIT": glu.limit is not None, "SWAP": tile.swap, "TMA": tile.tma,
            "EVEN_N": self.columns % tile.columns == 0, "EVEN_K": size % tile.depth == 0,
            "PRECISION": "ieee" if rows.dtype == torch.float32 else "tf32",
            "num_warps": tile.num_warps, "num_stages": self.stages(rows, tile), **early_launch(rows.device),
        }  # fmt: skip

    def stages(self, rows: torch.Tensor, tile: GroupedTile) -> int:
        """The tile's stages, or as many as shared memory holds: each buffers a tile of rows and of each weight."""
        height = tile.rows + tile.columns * (2 if self.activation else 1)
        return max(1, min(tile.num_stages, shared_memory(rows.device) // (height * tile.depth * rows.element_size())))


def scan_product(product: Product, x: Activations, ids: torch.Tensor, per_row: int, tile: GroupedTile) -> torch.Tensor:
    """x [T * K / per_row, size] -> the pairs' rows [T * K, N]; those of pairs routed nowhere are not written."""
    arguments = product.arguments(x, tile)
    num_pairs, num_experts = ids.numel(), product.weight.shape[0]
    p_x = arguments["p_x"]
    out = torch.empty(num_pairs, product.columns, dtype=p_x.dtype, device=p_x.device)
    grid = (cdiv(product.columns, tile.columns), min(num_pairs, num_experts))
    scan_product_kernel[grid](
        p_ids=ids, p_out=out, num_pairs=num_pairs, DIV=per_row, BPAIRS=next_power_of_2(num_pairs),
        BY_PAIR=num_pairs < num_experts, **arguments,
    )  # fmt: skip
    return out


def sorted_product(
    product: Product, x: Activations, pairs: SortedPairs, per_row: int, tile: GroupedTile, *,
    x_sorted: bool = False, out_sorted: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The same over sorted pairs; x_sorted, out_sorted: rows lie in the order of `pairs`, not that of the ids."""
    assert tile.rows == pairs.tile_rows, (tile, pairs.tile_rows)
    arguments = product.arguments(x, tile)
    p_x = arguments["p_x"]
    out = torch.empty(len(pairs.order), product.columns, dtype=p_x.dtype, device=p_x.device)
    most = pairs.tiles.shape[1] * cdiv(product.columns, tile.columns)
    programs = min(most, tile.programs * multiprocessors(p_x.device)) if tile.programs else most
    sorted_product_kernel[(programs,)](
        p_order=pairs.order, p_tiles=pairs.tiles, p_num_tiles=pairs.num_tiles, p_out=out,
        MOST_TILES=pairs.tiles.shape[1], DIV=per_row, X_SORTED=x_sorted, OUT_SORTED=out_sorted, **arguments,
    )  # fmt: skip
    return out
