"""Holds what a model says of its layers of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from app.kernels.moe import GLU, RoutingRule


@dataclass(slots=True, frozen=True)
class ExpertSettings:
    """Sizes and switches; sizes are the model's, before they are split over ranks. ValueError: layers lack experts, or
    a token is to go to more than may be chosen: kernels would read behind the last one."""

    num_experts: int
    intermediate_size: int  # of one expert
    rule: RoutingRule  # without types: see `rule_in`
    layers: frozenset[int]  # those that have experts; the others have one feed-forward layer
    activation: GLU | None = None  # None: the model's hidden_act
    rounds_logits: bool = True  # to the model's type
    rounds_weights: bool = False
    gate_bias: bool = False
    gate_dtype: torch.dtype | None = None  # of its weight; None: the model's
    corrects: bool = False  # the gate holds numbers that are added to scores for choosing only
    bias: bool = False  # of the experts' products
    weighs_input: bool = False  # routing weights multiply what experts read
    shared_size: int = 0  # width of the feed-forward layer that every token goes through; 0: there is none
    num_identity: int = 0  # experts behind the others that give back what they read
    gates_shared: bool = False  # its output is multiplied by the sigmoid of a gate of its own

    def __post_init__(self) -> None:
        if not self.layers:
            return
        if self.num_experts < 1:
            raise ValueError("layers with experts, of which there are none")
        scored, rule = self.num_experts + self.num_identity, self.rule
        if rule.num_groups < 1 or scored % rule.num_groups:
            raise ValueError(f"{scored} experts are in {rule.num_groups} groups")
        if not 1 <= rule.groups_chosen <= rule.num_groups:
            raise ValueError(f"{rule.groups_chosen} groups are chosen of {rule.num_groups}")
        if rule.num_groups > 1 and rule.group_score == "top2" and scored // rule.num_groups < 2:
            raise ValueError(f"{rule.num_groups} groups of {scored} experts, of which the best two of each count")
        most = scored // rule.num_groups * rule.groups_chosen
        if not 1 <= rule.top_k <= most:
            raise ValueError(f"a token goes to {rule.top_k} experts of {most} that may be chosen")

    def rule_in(self, dtype: torch.dtype) -> RoutingRule:
        """The rule of a model of this type."""
        return replace(
            self.rule,
            logits_dtype=dtype if self.rounds_logits else None,
            weights_dtype=dtype if self.rounds_weights else None,
        )
