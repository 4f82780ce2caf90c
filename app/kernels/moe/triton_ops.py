"""Experts on a GPU in Triton (`OPS`): the gate, two grouped products and the sum are four launches where tokens are
few, and one more, which sorts their pairs, where they are many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from app.kernels.gemm import Activations, DeferredNorm, materialize
from app.kernels.gemm.stored import StoredTiles
from app.kernels.gemm.triton_quantize import quantize
from app.kernels.moe import AddToRows, ExpertRows, ExpertWeights, MoEOps, PackedExperts, Routing
from app.kernels.moe.reference import glu
from app.kernels.moe.stored import fp8_tiles, serves, stored_tiles
from app.kernels.moe.tiles import Fp8LayerTiles, LayerTiles, tiles_for
from app.kernels.moe.triton_few import FewRows
from app.kernels.moe.triton_fp8 import Fp8Product, RoundedRows, down_product, gate_up_product
from app.kernels.moe.triton_gate import gate, route
from app.kernels.moe.triton_grouped import GroupedTile, Product, scan_product, sorted_product
from app.kernels.moe.triton_slots import to_slots
from app.kernels.moe.triton_sort import sort_pairs
from app.kernels.moe.triton_stored import plain_experts
from app.kernels.moe.triton_sum import sum_add_norm, sum_rows

PairProduct = Callable[..., torch.Tensor]
MOST_FEW = 8  # tokens whose down product is summed in the same launch


class SummedRows(ExpertRows):
    """Rows [T * K, C] in the order of the ids; those routed nowhere are undefined."""

    def __init__(self, rows: torch.Tensor, routing: Routing, *, is_weighed: bool) -> None:
        self.rows, self.routing = rows, routing
        self.weights = None if is_weighed else routing.weights

    def materialize(self) -> torch.Tensor:
        """[T, C]."""
        return sum_rows(self.rows, self.routing, self.weights, self.shared)

    def add_norm(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, may_defer: bool
    ) -> tuple[Activations, torch.Tensor]:
        """Both [T, C]; the norm is deferred where rows are few."""
        return sum_add_norm(
            self.rows, self.routing, self.weights, self.shared, residual, norm_weight, eps, may_defer
        )  # fmt: skip


def _readable(
    weight: torch.Tensor | PackedExperts, dtype: torch.dtype, tiles: LayerTiles
) -> torch.Tensor | StoredTiles:
    """The weight as a grouped product reads it."""
    stored = None if tiles.unpacks else stored_tiles(weight)
    return plain_experts(weight, dtype) if stored is None else stored


def _rounded_experts(x: Activations, routing: Routing, weights: ExpertWeights, tiles: Fp8LayerTiles) -> torch.Tensor:
    """The rows of `experts` with activations in e4m3: x is rounded before its rows are gathered."""
    gate_up, down = fp8_tiles(weights.gate_up), fp8_tiles(weights.down)
    assert gate_up is not None, "these experts take activations as they are"
    assert down is not None, "these experts take activations as they are"
    rows = materialize(x)
    given = routing.weights if weights.weighs_input else None
    first = Fp8Product(gate_up, weights.gate_up_bias, weights.activation, given)
    pairs = sort_pairs(routing.ids, weights.down.shape[0], tiles.gate_up.rows)
    rounded = RoundedRows(*quantize(rows, "e4m3", by_blocks=True))
    h = gate_up_product(first, rounded, pairs, routing.ids.shape[1], tiles.gate_up)
    return down_product(Fp8Product(down, weights.down_bias), h, pairs, tiles.down, rows.dtype)


def experts(
    x: Activations, routing: Routing, weights: ExpertWeights, tiles: LayerTiles | Fp8LayerTiles | None = None
) -> ExpertRows:
    """The same as `reference.experts`."""
    rows = x.rows if isinstance(x, DeferredNorm) else x
    ids, top = routing.ids, routing.ids.shape[1]
    if ids.numel() == 0:
        return SummedRows(rows.new_empty(0, rows.shape[1]), routing, is_weighed=weights.weighs_input)
    tiles = tiles or tiles_for(ids, weights, rows.dtype)
    if isinstance(tiles, Fp8LayerTiles):
        rows = _rounded_experts(x, routing, weights, tiles)
        return SummedRows(rows, routing, is_weighed=weights.weighs_input)
    is_few = not tiles.is_sorted and ids.shape[0] <= MOST_FEW
    if is_few and isinstance(weights.down, torch.Tensor):
        return FewRows(
            scan_product(_first(routing, weights, tiles, rows.dtype), x, ids, top, tiles.gate_up), routing, weights
        )
    return SummedRows(pair_rows(x, routing, weights, tiles), routing, is_weighed=weights.weighs_input)


def _first(routing: Routing, weights: ExpertWeights, tiles: LayerTiles, dtype: torch.dtype) -> Product:
    """Gate and up with their activation."""
    return Product(
        _readable(weights.gate_up, dtype, tiles), weights.gate_up_bias, weights.activation,
        routing.weights if weights.weighs_input else None,
    )  # fmt: skip


def pair_rows(x: Activations, routing: Routing, weights: ExpertWeights, tiles: LayerTiles) -> torch.Tensor:
    """x [T, C] through its experts: rows [T * K, C] in the order of the ids."""
    dtype = x.rows.dtype if isinstance(x, DeferredNorm) else x.dtype
    ids, top = routing.ids, routing.ids.shape[1]
    gate_up = _first(routing, weights, tiles, dtype)
    down = Product(_readable(weights.down, dtype, tiles), weights.down_bias)
    if tiles.is_sorted:
        pairs = sort_pairs(ids, weights.down.shape[0], tiles.gate_up.rows)
        h = sorted_product(gate_up, x, pairs, top, tiles.gate_up, out_sorted=True)
        return sorted_product(down, h, pairs, 1, tiles.down, x_sorted=True)
    return scan_product(down, scan_product(gate_up, x, ids, top, tiles.gate_up), ids, 1, tiles.down)


def adapted(
    x: Activations,
    routing: Routing,
    weights: ExpertWeights,
    gate_up: AddToRows,
    down: AddToRows,
    tiles: LayerTiles | Fp8LayerTiles | None = None,
) -> ExpertRows:
    """The same as `reference.adapted`: both products as they are, in the order of the ids. Experts whose products round
    activations are unpacked, and nothing is rounded."""
    rows, (ids, given) = materialize(x), routing
    if ids.numel() == 0:
        return SummedRows(rows.new_empty(0, rows.shape[1]), routing, is_weighed=weights.weighs_input)
    tiles = tiles or tiles_for(ids, weights, rows.dtype)
    if isinstance(tiles, Fp8LayerTiles):
        plain = (plain_experts(weight, rows.dtype) for weight in (weights.gate_up, weights.down))
        weights = replace(weights, gate_up=next(plain), down=next(plain))
        tiles = tiles_for(ids, weights, rows.dtype)
        assert isinstance(tiles, LayerTiles)
    tokens = torch.arange(len(rows), device=rows.device).repeat_interleave(ids.shape[1])
    chosen, pairs = ids.flatten(), rows.repeat_interleave(ids.shape[1], 0)
    multiply = _pair_products(ids, weights, tiles, rows.dtype)
    h = gate_up(pairs, tokens, chosen, multiply(pairs, weights.gate_up, tiles.gate_up))
    if weights.weighs_input:
        h = (h.float() * given.flatten()[:, None]).to(h.dtype)
    if weights.gate_up_bias is not None:
        h = h + weights.gate_up_bias[chosen.clamp(min=0).long()]
    h = glu(h, weights.activation)
    out = multiply(h, weights.down, tiles.down, weights.down_bias)
    return SummedRows(down(h, tokens, chosen, out), routing, is_weighed=weights.weighs_input)


def _pair_products(ids: torch.Tensor, weights: ExpertWeights, tiles: LayerTiles, dtype: torch.dtype) -> PairProduct:
    """The product of rows [T * K, ...] in the order of the ids, and of rows in that order."""
    pairs = sort_pairs(ids, weights.down.shape[0], tiles.gate_up.rows) if tiles.is_sorted else None

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor | PackedExperts,
        tile: GroupedTile,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        product = Product(_readable(weight, dtype, tiles), bias)
        return scan_product(product, x, ids, 1, tile) if pairs is None else sorted_product(product, x, pairs, 1, tile)

    return multiply


OPS = MoEOps(route=route, gate=gate, experts=experts, adapted=adapted, to_slots=to_slots, serves=serves)
