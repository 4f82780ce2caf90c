"""Experts on a CPU, a token's output the same to the bit whatever tokens come with it: products in blocks of fixed rows
(gemm/fixed_rows.py), the rest of operations that look at no neighbour (`exact_math`)."""

from __future__ import annotations

import torch

from app.errors import UnsupportedError
from app.kernels.exact_math import sigmoid, softmax, tree_sum
from app.kernels.fused.exact import ACTIVATIONS, add_rms_norm
from app.kernels.gemm import Activations, materialize
from app.kernels.gemm.fixed_rows import linear
from app.kernels.moe import (
    GLU,
    LEAST_SUM,
    AddToRows,
    ExpertRows,
    ExpertWeights,
    MoEOps,
    Routing,
    RoutingRule,
    reference,
)


def route(
    logits: torch.Tensor,
    rule: RoutingRule,
    *,
    correction: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> Routing:
    """logits [T, E] -> the experts of each token."""
    logits, own = reference.split_own(reference.rounded(logits, rule.logits_dtype), rule)
    ids, weights = _choose(logits, rule, correction)
    if rule.renormalize:
        weights = weights / (tree_sum(weights).unsqueeze(1) + LEAST_SUM)
    weights_of_own = None if own is None else sigmoid(own)
    return reference.with_shared(ids, weights, weights_of_own, logits.shape[1], rule, slot_mapping)


def _choose(
    logits: torch.Tensor, rule: RoutingRule, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [T, top_k], their weights) of fp32 logits [T, E]."""
    if rule.scoring == "sparsemixer" or rule.num_groups > 1:
        raise UnsupportedError("deterministic: this model's way to choose experts", param="deterministic")
    if rule.scoring == "softmax_of_chosen":
        ids = reference.best_of(logits if correction is None else softmax(logits) + correction, rule.top_k)
        return ids, softmax(logits.gather(1, ids))
    scores = sigmoid(logits) if rule.scoring == "sigmoid" else softmax(logits)
    ids = reference.best_of(logits if correction is None else scores + correction, rule.top_k)
    return ids, scores.gather(1, ids)


def gate(
    x: Activations,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: RoutingRule,
    *,
    correction: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> Routing:
    """x [T, C] times the gate's weight [E, C], transposed, plus bias [E], in fp32; then `route`."""
    logits = linear(materialize(x).float(), weight.float(), None if bias is None else bias.float())
    return route(logits, rule, correction=correction, slot_mapping=slot_mapping)


def glu(gate_up: torch.Tensor, activation: GLU) -> torch.Tensor:
    """Gate and up side by side, [T, 2 I] -> [T, I], in fp32 and rounded once."""
    if not activation.has_gate or activation != GLU(activation.function):
        raise UnsupportedError("deterministic: the activation of this model's experts", param="deterministic")
    gate, up = gate_up.float().chunk(2, dim=-1)
    return ACTIVATIONS[activation.function](gate).mul_(up).to(gate_up.dtype)


class ExactRows(reference.PlainRows):
    """The rows, and a norm that looks at no neighbour."""

    def add_norm(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, may_defer: bool
    ) -> tuple[Activations, torch.Tensor]:
        """Both [T, C]; never deferred."""
        return add_rms_norm(self.materialize(), residual, norm_weight, eps)


def experts(x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertRows:
    """x [T, C] through its experts."""
    rows = reference.rows_by(materialize(x), routing, weights, linear, glu)
    return ExactRows(rows, routing, is_weighed=weights.weighs_input)


def adapted(
    x: Activations, routing: Routing, weights: ExpertWeights, gate_up: AddToRows, down: AddToRows
) -> ExpertRows:
    """UnsupportedError: what adapters add was not shown to be exact."""
    raise UnsupportedError("deterministic: adapters of experts", param="deterministic")


OPS = MoEOps(route=route, gate=gate, experts=experts, adapted=adapted, to_slots=reference.to_slots)
