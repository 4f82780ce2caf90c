"""Experts of one row each, very many of them, found by two halves of a key (PEER: He, "Mixture of a Million Experts",
2024), beside a feed-forward layer that all tokens share."""

from __future__ import annotations

import math

import torch

from app.errors import UnsupportedError
from app.kernels.gemm import Activations, materialize
from app.layers.activation import activation
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN, Epilogue, ResultT
from app.layers.mlp import GatedMLP
from app.layers.replicated import ReplicatedLinear, ReplicatedTable

MAX_ROWS_BYTES = 1 << 26  # of the experts' rows that are gathered at a time


class RowExpertMLP(GatedMLP):
    """mlp(x), and for each chosen expert its weight times act(down . x) times up.

    Every rank holds all rows, and of those that a token chose each adds up its part.
    """

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        bias: bool,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool,
    ) -> None:
        super().__init__(ctx, hidden_size, intermediate_size, hidden_act, bias)
        self.down_proj.sums_up = False
        self.num_keys, self.top_k, self.renormalize = math.isqrt(num_experts), top_k, renormalize
        if not 0 < top_k <= self.num_keys**2:
            what = f"num_experts_per_tok={top_k} of {self.num_keys**2} experts"
            raise UnsupportedError(f"{what} (the square of a whole number, within num_experts)", param="model")
        self.router_gate = ReplicatedLinear(ctx, hidden_size, 2 * self.num_keys, bias=False)
        self.down_embed = ReplicatedTable(ctx, num_experts, hidden_size)
        self.up_embed = ReplicatedTable(ctx, num_experts, hidden_size)
        self.expert_act = activation(hidden_act)
        self.tp = ctx.groups.tp
        self.rows_at_a_time = max(1, MAX_ROWS_BYTES // (ctx.dtype.itemsize * hidden_size * top_k))

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext | None = None) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        shared: torch.Tensor = super().forward(x, PLAIN, ctx)
        rows = materialize(x)
        found = shared + torch.cat([self._experts(part) for part in torch.split(rows, self.rows_at_a_time)])
        return epilogue.after_all_reduce(self.tp, found) if self.tp.size > 1 else epilogue.after(found)

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, C] -> this rank's part of the sum [T, C]."""
        weights, chosen = self._choose(x)
        mine = slice(self.tp.rank, None, self.tp.size)
        weights, chosen = weights[:, mine], chosen[:, mine]
        hidden = torch.einsum("tkc,tc->tk", self.down_embed(chosen), x)
        weighed = self.expert_act(hidden) * weights.to(hidden.dtype)
        return torch.einsum("tk,tkc->tc", weighed, self.up_embed(chosen))

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights fp32 and numbers [T, K] of the experts whose keys' halves have the largest sums of scores: of each,
        both are among the best K."""
        halves = self.router_gate(x).float().unflatten(-1, (2, self.num_keys))
        scores, keys = halves.topk(min(self.top_k, self.num_keys), dim=-1)
        sums = (scores[:, 0, :, None] + scores[:, 1, None, :]).flatten(1)
        numbers = (keys[:, 0, :, None] * self.num_keys + keys[:, 1, None, :]).flatten(1)
        best, places = sums.topk(self.top_k, dim=-1)
        weights = best.softmax(-1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, numbers.gather(1, places)
