"""Experts with one bias behind the sum of what they gave (JetMoE, Nomic Embed v2)."""

from __future__ import annotations

import torch

from app.kernels.gemm import Activations, materialize
from app.layers.context import BuildContext
from app.layers.experts.expert_mlp import ExpertMLP
from app.layers.experts.settings import ExpertSettings
from app.layers.weight import REPLICATED, Weight


class BiasedExpertMLP(ExpertMLP):
    """The experts' sum and the bias, which is added once among the ranks."""

    def __init__(self, ctx: BuildContext, hidden_size: int, hidden_act: str, settings: ExpertSettings) -> None:
        super().__init__(ctx, hidden_size, hidden_act, settings)
        self.bias = Weight(torch.empty(hidden_size, dtype=ctx.dtype), REPLICATED)

    def _shared(self, x: Activations) -> torch.Tensor | None:
        if self.tp.rank:
            return None
        return self.bias.expand_as(materialize(x)).contiguous()
