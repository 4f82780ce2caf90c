"""Low-rank products on a GPU.

A step of few rows, whose base products are our own, has one launch more for each of them: the first half of the
low-rank products. The second half is the base product's to add (kernels/gemm/triton_low_rank.py), which reads its
weight beside that launch. Other base products stand first, and a second launch adds to them.
"""

from __future__ import annotations

import torch

from app.kernels.fused import GatedActivation
from app.kernels.fused.triton_ops import add_rms_norm
from app.kernels.gemm import Activations, GatedRows, Inputs, LinearOps, materialize, triton_small
from app.kernels.gemm.small_tiles import MOST_ROWS, SmallTile, activated_tile, added_tile, plain_tile
from app.kernels.gemm.triton_low_rank import MOST_PARTS, LowRankRows
from app.kernels.launch import cdiv
from app.kernels.lora import AdaptedWeight, LoraOps, SlotMatrices, SlotRows
from app.kernels.lora.apart import ops_apart
from app.kernels.lora.gathered import add_expert_products
from app.kernels.lora.triton_change import change
from app.kernels.lora.triton_expand import COLUMNS, expand
from app.kernels.lora.triton_shrink import Hidden, shrink
from app.kernels.lora.triton_shrink_few import depth_of, shrink_few
from app.kernels.lora.triton_sort import SortedTokens, rows_by_slot


def add_products(x: Inputs, matrices: SlotMatrices, rows: SlotRows, y: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """See AddProducts."""
    assert isinstance(rows, SortedTokens)
    return expand(shrink(x, matrices, rows), matrices, rows, y, in_place=in_place)


_APART = ops_apart(add_products)


def linear(x: Inputs, weight: AdaptedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product, and what is added to it."""
    x = x if isinstance(x, Activations) else materialize(x)
    tile = plain_tile(x, weight.weight) if _is_plain(weight) else None
    low_rank = _low_rank(x, weight, tile)
    if tile is None or low_rank is None:
        return _APART.linear(x, weight, bias)
    return triton_small.small_linear(x, weight.weight, bias, tile, low_rank=low_rank[0])


def gated_linear(
    x: Activations, weight: AdaptedWeight, bias: torch.Tensor | None, activation: GatedActivation
) -> GatedRows:
    """Gate and up with what is added to each, and their activation."""
    tile = activated_tile(x, weight.weight) if _is_plain(weight) else None
    low_rank = _low_rank(x, weight, tile)
    if tile is not None and low_rank is not None:
        return triton_small.small_linear(x, weight.weight, bias, tile, activation, low_rank[0], is_gated=True)
    rows = _rows(weight)
    y = weight.ops.linear(x, weight.weight, bias)
    return expand(shrink(x, weight.matrices, rows), weight.matrices, rows, y, activation=activation)


def linear_add_norm(
    x: GatedRows,
    weight: AdaptedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    may_defer: bool,
) -> tuple[Activations, torch.Tensor]:
    """The sum of the product, what is added to it and the residual, and that sum's norm."""
    if _is_plain(weight):
        x = materialize(x)
        tile = added_tile(x, weight.weight)
        if tile is None:  # nothing joins the sum
            return add_rms_norm(_APART.linear(x, weight, bias), residual, norm_weight, eps)
        if (low_rank := _low_rank(x, weight, tile)) is not None:
            norm = norm_weight, eps
            return triton_small.add_and_norm(x, weight.weight, bias, residual, tile, norm, may_defer, low_rank[0])
    return _APART.linear_add_norm(x, weight, bias, residual, norm_weight, eps, may_defer)


def _is_plain(weight: AdaptedWeight) -> bool:
    """True if our products of few rows may make it."""
    return weight.ops is triton_small.OPS


def _low_rank(x: Activations, weight: AdaptedWeight, tile: SmallTile | None) -> tuple[LowRankRows, Hidden] | None:
    """Returns the rows that a base product with this tile adds, and memory that must live until it is launched; None:
    there is no such product, as where one program of it would compute outputs of two parts."""
    rows, matrices = _rows(weight), weight.matrices
    depth = depth_of(matrices.first.shape[-1])
    if tile is None or depth is None or len(rows.slots) > MOST_ROWS:
        return None
    if len(matrices.part_sizes) > MOST_PARTS or any(size % tile.columns for size in matrices.part_sizes):
        return None
    hidden = shrink_few(x, matrices, rows, depth)
    return LowRankRows(hidden.values, rows.slots, rows.jobs, matrices.second, matrices.part_sizes), hidden


def add_looked_up(inputs: torch.Tensor, matrices: SlotMatrices, rows: SlotRows, y: torch.Tensor) -> torch.Tensor:
    """See AddLookedUp. What lies behind an adapter's ranks is picked, too, and not read any more."""
    assert isinstance(rows, SortedTokens)
    slots, own = rows.slots.clamp(min=0).long(), inputs.clamp(min=0).long()
    picked = matrices.first[slots, :, 0, :, own]  # [T, tiles, TILE_RANK]
    values = picked.masked_fill((inputs < 0)[:, None, None], 0.0).flatten(1).unsqueeze(1)
    return expand(Hidden(values, None), matrices, rows, y, in_place=True)


def _rows(weight: AdaptedWeight) -> SortedTokens:
    assert isinstance(weight.rows, SortedTokens)
    return weight.rows


def part_tiles(part_sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Pieces of COLUMNS outputs, none across two parts."""
    pieces, start = [], 0
    for part, size in enumerate(part_sizes):
        for number in range(cdiv(size, COLUMNS)):
            begin = start + number * COLUMNS
            pieces.append((begin, min(begin + COLUMNS, start + size), part))
        start += size
    return torch.tensor(pieces, dtype=torch.int32, device=device)


OPS = LoraOps(
    rows_by_slot=rows_by_slot,
    add_products=add_products,
    linear=LinearOps(linear, gated_linear, linear_add_norm),
    changed=ops_apart(add_products, change),
    add_looked_up=add_looked_up,
    add_expert_products=add_expert_products,
    change=change,
    part_tiles=part_tiles,
)
