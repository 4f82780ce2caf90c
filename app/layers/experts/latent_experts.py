"""Experts that read and give a smaller vector than the rest of the model (Nemotron 3 Super's "LatentMoE")."""

from __future__ import annotations

from app.kernels.gemm import Activations, materialize
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.experts.expert_mlp import ExpertMLP
from app.layers.experts.settings import ExpertSettings
from app.layers.replicated import ReplicatedLinear


class LatentExpertMLP(ExpertMLP):
    """One product before all experts, and one behind their sum; the gate and what all tokens share read x itself.

    Each rank makes both products whole, the second one of its own part of the sum.
    """

    def __init__(
        self, ctx: BuildContext, hidden_size: int, hidden_act: str, settings: ExpertSettings, latent_size: int
    ) -> None:
        super().__init__(ctx, hidden_size, hidden_act, settings, expert_size=latent_size)
        self.fc1_latent_proj = ReplicatedLinear(ctx, hidden_size, latent_size, bias=False)
        self.fc2_latent_proj = ReplicatedLinear(ctx, latent_size, hidden_size, bias=False)

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        read, routing = self.fc1_latent_proj(materialize(x)), self.gate.choose(x, ctx)
        given = self.fc2_latent_proj(self.experts(read, routing, ctx).materialize())
        shared = self._shared(x)
        given = given if shared is None else given + shared
        return epilogue.after_all_reduce(self.tp, given) if self.tp.size > 1 else epilogue.after(given)
