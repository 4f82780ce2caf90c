"""Experts on a GPU, a token's output the same to the bit whatever tokens come with it (the option `deterministic`).

As in gemm/triton_fixed.py a number of a product is one sum over all inputs in their order, made by one instruction of
tensor cores, and K is never split; which tokens share a tile changes no sum. The gate has one tile for any number of
tokens, and norms are never deferred.
"""

from __future__ import annotations

from functools import partial

import torch

from app.errors import UnsupportedError
from app.kernels.gemm import Activations, materialize
from app.kernels.moe import AddToRows, ExpertRows, ExpertWeights, MoEOps, Routing
from app.kernels.moe.tiles import layer_tiles
from app.kernels.moe.triton_gate import GateTile, gate, route
from app.kernels.moe.triton_ops import SummedRows, pair_rows
from app.kernels.moe.triton_slots import to_slots

GATE_TILE = GateTile(16, 16, 128, 4, 4, 4, is_fixed=True)


class ExactRows(SummedRows):
    """The rows, and a norm that looks at no neighbour."""

    def add_norm(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, may_defer: bool
    ) -> tuple[Activations, torch.Tensor]:
        """Both [T, C]; never deferred."""
        return super().add_norm(residual, norm_weight, eps, False)


def experts(x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertRows:
    """The same as `reference.experts`, by those tiles whose side of 64 rows is one instruction's."""
    rows = materialize(x)
    if routing.ids.numel() > 0:
        tiles = layer_tiles(routing.ids.numel(), weights.down.shape[0], rows.dtype)
        rows = pair_rows(rows, routing, weights, tiles)
    return ExactRows(rows, routing, is_weighed=weights.weighs_input)


def adapted(
    x: Activations, routing: Routing, weights: ExpertWeights, gate_up: AddToRows, down: AddToRows
) -> ExpertRows:
    """UnsupportedError: what adapters add was not shown to be exact."""
    raise UnsupportedError("deterministic: adapters of experts", param="deterministic")


OPS = MoEOps(
    route=partial(route, is_fixed=True), gate=partial(gate, tile=GATE_TILE), experts=experts, adapted=adapted,
    to_slots=to_slots,
)  # fmt: skip
