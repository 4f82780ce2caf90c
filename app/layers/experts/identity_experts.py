"""Experts that give back what they read (LongCat-Flash's "zero experts"): a token that goes to them computes less."""

from __future__ import annotations

import torch

from app.kernels.moe import Routing


def without_identity(routing: Routing, num_experts: int) -> tuple[Routing, torch.Tensor]:
    """(the routing to the experts below `num_experts`, what a token's rows are multiplied by for those behind them
    [T, 1])."""
    is_identity = routing.ids >= num_experts
    weight = torch.where(is_identity, routing.weights, 0.0).sum(1, keepdim=True)
    return routing._replace(ids=routing.ids.masked_fill(is_identity, -1)), weight
