"""The gate: which experts a token goes to, and with what weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from app.kernels.gemm import Activations
from app.kernels.moe import MOE_OPS, Routing
from app.layers.context import BuildContext, ForwardContext
from app.layers.experts.settings import ExpertSettings
from app.layers.replicated import ReplicatedLinear
from app.layers.weight import REPLICATED, Weight

SHARED_GATE = "shared_expert_gate"  # its name in checkpoints


class Gate(ReplicatedLinear):
    """One product and the model's rule; every rank chooses alike."""

    def __init__(self, ctx: BuildContext, hidden_size: int, settings: ExpertSettings, num_shared: int = 0) -> None:
        """`num_shared`: experts behind those that are chosen from, that every token goes to; their own gate, if they
        have one, is the last row of this one's weight."""
        num_experts, gates_shared = settings.num_experts + settings.num_identity, settings.gates_shared
        gates_shared &= num_shared > 0
        parts = {"gate": num_experts, SHARED_GATE: 1} if gates_shared else {}
        super().__init__(ctx, hidden_size, num_experts, settings.gate_bias, settings.gate_dtype, parts)
        self.e_score_correction_bias = (
            Weight(torch.empty(num_experts, dtype=torch.float32), REPLICATED) if settings.corrects else None
        )
        self.rule = replace(settings.rule_in(ctx.dtype), num_shared=num_shared, gates_shared=gates_shared)
        self.num_experts, self.is_cut = num_experts, False
        self.ops = ctx.kernels(MOE_OPS)

    @property
    def of_shared(self) -> torch.Tensor:
        """The rows of its weight behind those of experts that are chosen from, [1 or 0, C]."""
        return self.multiplier[self.num_experts :]

    def leave_shared(self) -> None:
        """Choose without the shared experts, which are no experts among the others."""
        self.is_cut = self.rule.gates_shared
        self.rule = replace(self.rule, num_shared=0, gates_shared=False)

    def choose(self, x: Activations, ctx: ForwardContext) -> Routing:
        """x [T, C] -> experts [T, K] and their weights; padding goes to none."""
        return self.ops.gate(
            x,
            self.multiplier[: self.num_experts] if self.is_cut else self.multiplier,
            self.bias,
            self.rule,
            correction=self.e_score_correction_bias,
            slot_mapping=ctx.slot_mapping,
        )
