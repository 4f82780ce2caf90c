# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Grouped products in which both sides are e4m3 (DeepSeek-V3, arXiv 2412.19437): sorted rows of activations with a
scale for each 128 of their columns, experts' weights with one for each block of 128 x 128.

Tensor cores sum up the 128 products of a block from zero, and what they give is scaled and added in fp32. A tile has
two blocks of the weight's rows, for which a block of x is read once: gate's and up's of the same columns, or two
neighbours of down's. So gate and up have whole blocks of what the down product reads, which they round to e4m3
themselves. Bytes of a block are in the order of `stored.py` on both sides of a product: its halves in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from app.kernels.gemm.fp8 import FP8, LARGEST, LEAST_SCALE
from app.kernels.gemm.stored import BLOCK, StoredTiles
from app.kernels.launch import cdiv, early_launch, multiprocessors
from app.kernels.moe import GLU
from app.kernels.moe.gluon_fp8 import launch_wide
from app.kernels.moe.triton_sort import SortedPairs
from app.kernels.moe.triton_tile import gated
from app.kernels.quick_launch import quick_launch

_LARGEST, _LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)


@dataclass(slots=True, frozen=True)
class Fp8Tile:
    """Tile sizes and launch options; its columns are two blocks."""

    rows: int
    num_warps: int
    num_stages: int
    programs: int = 0  # of a persistent grid, for each multiprocessor; 0: a program a tile
    in_gluon: bool = False  # the kernel for Hopper GPUs, whose tiles have 128 rows


@dataclass(slots=True, frozen=True)
class RoundedRows:
    """Rows of activations in e4m3."""

    rows: torch.Tensor  # e4m3 [T, blocks * 128], in the order of `stored.py`
    scales: torch.Tensor  # fp32 [T or more, blocks], a column's next to each other


@dataclass(slots=True, frozen=True)
class Fp8Product:
    """One of the two grouped products of a layer: its weight and what rides along."""

    weight: StoredTiles  # [E, N or 2 N, K]; every tensor of it with a leading dimension of experts
    bias: torch.Tensor | None  # [E, N or 2 N]
    activation: GLU | None = None  # gate and up, with their activation
    pair_weights: torch.Tensor | None = None  # fp32 [T, K]: multiply the rows before biases

    @property
    def columns(self) -> int:
        """Those of the result."""
        rows = self.weight.words.shape[1]
        return rows // 2 if self.activation else rows

    def arguments(self, x: RoundedRows, pairs: SortedPairs, per_row: int) -> dict[str, Any]:
        """Returns what every kernel takes; x has a row for `per_row` pairs, or, 0, one for each in their order."""
        weight, glu = self.weight, self.activation or GLU()
        assert x.rows.is_contiguous()
        assert x.scales.stride(0) == 1
        return {
            "p_x_scales": x.scales, "p_scales": weight.scales, "p_bias": self.bias, "p_weights": self.pair_weights,
            "p_order": pairs.order, "p_tiles": pairs.tiles, "p_num_tiles": pairs.num_tiles, "N": self.columns,
            "num_blocks": x.rows.shape[1] // BLOCK, "stride_scales": x.scales.stride(1),
            "num_scales": weight.scales.shape[2], "limit": glu.limit or 0.0, "alpha": glu.alpha,
            "up_offset": glu.up_offset, "MOST_TILES": pairs.tiles.shape[1], "DIV": per_row,
            "GATED": self.activation is not None, "ACT": glu.function, "HAS_LIMIT": glu.limit is not None,
            **early_launch(x.rows.device),
        }  # fmt: skip


@triton.jit
def rounded(b_x, BM: tl.constexpr):
    """(e4m3 [BM, 128] of a block, its halves in turn; fp32 [BM] scales)."""
    b_scale = tl.maximum(tl.max(tl.abs(b_x), 1) / _LARGEST, _LEAST_SCALE)
    b_x = tl.minimum(tl.maximum(tl.div_rn(b_x, b_scale[:, None]), -_LARGEST), _LARGEST)
    b_x = tl.reshape(tl.permute(tl.reshape(b_x, [BM, 2, 64]), (0, 2, 1)), [BM, 128])
    return b_x.to(tl.float8e4nv), b_scale


@quick_launch
@triton.jit(do_not_specialize=["MOST_TILES", "stride_scales", "num_pairs"])
def fp8_product_kernel(
    p_x, p_words, p_x_scales, p_scales, p_bias, p_weights, p_order, p_tiles, p_num_tiles, p_out, p_out_scales,
    N, num_blocks, stride_scales, num_scales, limit, alpha, up_offset, MOST_TILES, num_pairs,
    DIV: tl.constexpr, BM: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, HAS_LIMIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (programs,), which share the tiles: all columns of one tile of rows before the next. N is a multiple of 128;
    DIV: pairs of a row of x, 0: its rows lie in their order. GATED: p_out e4m3 [num_pairs, N] in the order of pairs,
    and p_out_scales fp32 [N / 128, num_pairs]; else p_out [num_pairs, N] in that of the ids."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    ALL: tl.constexpr = 2 if GATED else 1
    o_k, o_c = tl.arange(0, 128), tl.arange(0, 128)
    row = num_blocks * 128
    n_blocks = N // 128
    tiles_n = n_blocks if GATED else tl.cdiv(n_blocks, 2)
    num_tiles = tl.load(p_num_tiles) * tiles_n
    for i in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        i_tile, i_n = i // tiles_n, i % tiles_n
        i_e = tl.load(p_tiles + i_tile).to(tl.int64)
        start = tl.load(p_tiles + MOST_TILES + i_tile)
        o_m = tl.arange(0, BM)
        m_m = o_m < tl.load(p_tiles + 2 * MOST_TILES + i_tile)
        b_pair = tl.load(p_order + start + o_m, mask=m_m, other=0)
        b_row = start + o_m
        if DIV > 0:
            b_row = b_pair // DIV
        # A neighbour behind the last block is the last one again, and writes what that wrote.
        i_a = i_n if GATED else 2 * i_n
        i_b = n_blocks + i_n if GATED else tl.minimum(2 * i_n + 1, n_blocks - 1)
        p_rows = p_x + b_row.to(tl.int64)[:, None] * row + o_k[None, :]
        p_w = p_words + i_e * ALL * N * row + o_c[:, None] * row + o_k[None, :]
        p_a, p_b = p_w + i_a * 128 * row, p_w + i_b * 128 * row
        p_x_scale = p_x_scales + b_row
        p_w_scale = p_scales + i_e * num_blocks * num_scales
        b_a = tl.zeros([BM, 128], dtype=tl.float32)
        b_b = tl.zeros([BM, 128], dtype=tl.float32)
        # Scales come a block ahead: loads that no product waits for are not pipelined.
        b_next = tl.load(p_x_scale, mask=m_m, other=0.0)
        next_a, next_b = tl.load(p_w_scale + i_a), tl.load(p_w_scale + i_b)
        for i_k in range(num_blocks):
            b_scale, scale_a, scale_b = b_next, next_a, next_b
            ahead = tl.minimum(i_k + 1, num_blocks - 1)
            b_next = tl.load(p_x_scale + ahead.to(tl.int64) * stride_scales, mask=m_m, other=0.0)
            next_a = tl.load(p_w_scale + ahead * num_scales + i_a)
            next_b = tl.load(p_w_scale + ahead * num_scales + i_b)
            b_x = tl.load(p_rows, mask=m_m[:, None], other=0.0)
            b_a += tl.dot(b_x, tl.trans(tl.load(p_a))) * (b_scale * scale_a)[:, None]
            b_b += tl.dot(b_x, tl.trans(tl.load(p_b))) * (b_scale * scale_b)[:, None]
            p_rows += 128
            p_a += 128
            p_b += 128
        if p_weights is not None:
            b_weight = tl.load(p_weights + b_pair, mask=m_m, other=0.0)[:, None]
            b_a *= b_weight
            b_b *= b_weight
        if p_bias is not None:
            p_bias_row = p_bias + i_e * ALL * N + o_c
            b_a += tl.load(p_bias_row + i_a * 128).to(tl.float32)[None, :]
            b_b += tl.load(p_bias_row + i_b * 128).to(tl.float32)[None, :]
        if GATED:
            b_h = gated(b_a, b_b, limit, alpha, up_offset, ACT, HAS_LIMIT)
            b_bytes, b_scale = rounded(b_h, BM)
            o_out = start + o_m
            p_o = p_out + o_out.to(tl.int64)[:, None] * N + i_n * 128 + o_c[None, :]
            tl.store(p_o, b_bytes, mask=m_m[:, None])
            tl.store(p_out_scales + i_n.to(tl.int64) * num_pairs + o_out, b_scale, mask=m_m)
        else:
            p_o = p_out + b_pair.to(tl.int64)[:, None] * N + o_c[None, :]
            tl.store(p_o + i_a * 128, b_a.to(p_out.dtype.element_ty), mask=m_m[:, None])
            tl.store(p_o + i_b * 128, b_b.to(p_out.dtype.element_ty), mask=m_m[:, None])


def gate_up_product(
    product: Fp8Product, x: RoundedRows, pairs: SortedPairs, per_row: int, tile: Fp8Tile
) -> RoundedRows:
    """x [T, K] -> the pairs' activated rows in the order of `pairs`; those routed nowhere are not written."""
    num_pairs, columns = pairs.order.shape[0], product.columns
    out = torch.empty(num_pairs, columns, dtype=FP8, device=x.rows.device)
    scales = torch.empty(columns // BLOCK, num_pairs, dtype=torch.float32, device=x.rows.device)
    _launch(product, x, pairs, per_row, tile, out, scales)
    return RoundedRows(out, scales.t())


def down_product(
    product: Fp8Product, h: RoundedRows, pairs: SortedPairs, tile: Fp8Tile, dtype: torch.dtype
) -> torch.Tensor:
    """h [T * K, I] in the order of `pairs` -> their rows [T * K, N] in that of the ids."""
    out = torch.empty(pairs.order.shape[0], product.columns, dtype=dtype, device=h.rows.device)
    _launch(product, h, pairs, 0, tile, out, None)
    return out


def _launch(
    product: Fp8Product, x: RoundedRows, pairs: SortedPairs, per_row: int, tile: Fp8Tile, out: torch.Tensor,
    out_scales: torch.Tensor | None,
) -> None:  # fmt: skip
    assert tile.rows == pairs.tile_rows, (tile, pairs.tile_rows)
    most = pairs.tiles.shape[1] * cdiv(product.columns, BLOCK if product.activation else 2 * BLOCK)
    given = product.arguments(x, pairs, per_row) | {"p_out": out, "p_out_scales": out_scales, "num_pairs": len(out)}
    words = product.weight.words.view(FP8)
    if tile.in_gluon:
        del given["ACT"]
        programs = min(most, multiprocessors(out.device))
        launch_wide(programs, x.rows, words, tile.num_stages, given)
        return
    programs = min(most, tile.programs * multiprocessors(out.device)) if tile.programs else most
    fp8_product_kernel[(programs,)](
        p_x=x.rows, p_words=words, BM=tile.rows, num_warps=tile.num_warps, num_stages=tile.num_stages, **given
    )  # fmt: skip
