"""Tells whether a whole step (`kernels/whole_step`) serves a layer's experts, and what it must know of them."""

from __future__ import annotations

from typing import Any

from app.kernels.whole_step import StepExperts
from app.layers.context import BuildContext
from app.layers.experts.expert_mlp import ExpertMLP


def step_experts(mlp: Any, ctx: BuildContext) -> StepExperts | None:
    """Says which of a layer's experts are chosen; None: there are none, or they are more than a softmax over the gate's
    rows and one sum over the chosen ones."""
    if type(mlp) is not ExpertMLP or mlp.shared_experts is not None or mlp.num_identity:
        return None
    gate, rule, experts = mlp.gate, mlp.gate.rule, mlp.experts
    is_plain_gate = gate.e_score_correction_bias is None and gate.dtype == ctx.dtype
    is_softmax = rule.scoring in ("softmax", "softmax_of_chosen") and rule.logits_dtype == ctx.dtype
    is_plain_rule = rule.scale == 1.0 and rule.num_groups == 1 and rule.weights_dtype in (None, ctx.dtype)
    # Where experts move, or lie on several ranks, a layer counts who chose them, or chooses among those it has.
    is_whole = experts.map is None and not experts.num_shared and not experts.weighs_input
    if not (is_plain_gate and is_softmax and is_plain_rule and is_whole):
        return None
    return StepExperts(
        mlp.num_experts,
        rule.top_k,
        weighs_chosen=rule.renormalize or rule.scoring == "softmax_of_chosen",
        rounds_weights=rule.weights_dtype is not None,
        activation=experts.activation,
    )


def is_adapted(mlp: Any) -> bool:
    """True if adapters add to the gate's product, or to products of experts."""
    if not isinstance(mlp, ExpertMLP):
        return False
    pairs = (mlp.experts.gate_up_proj.pair_delta, mlp.experts.down_proj.pair_delta)
    return mlp.gate.delta is not None or any(one is not None for one in pairs)
