"""Lightning attention (Qin et al., 2024): linear attention whose heads forget by fixed rates.

A head's state is the sum of its values times its keys, each of which decays by the head's rate with every token: a
state space (`kernels/recurrent`) whose dt is 1, whose B and C are keys and queries. What it gives is normed whole and
gated. Ranks of a tensor-parallel group split the heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.kernels.gemm import Activations
from app.kernels.recurrent import SpaceInputs, StateStep
from app.layers.activation import activation
from app.layers.cache_spec import LayerStateSpec, StateTensor
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.gated_group_norm import GatedGroupNorm
from app.layers.linear import MergedColumnLinear, RowLinear
from app.layers.side_by_side import SideBySide
from app.layers.state_layer import StateLayer

PARTS = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_g")
NORM_EPS = 1e-6  # whatever the model's other norms have


@dataclass(slots=True, frozen=True)
class LightningSettings:
    """The shape of one layer, before it is split over ranks."""

    num_heads: int
    head_dim: int
    hidden_act: str  # of queries, keys and values

    def rates(self, layer: int, num_layers: int) -> torch.Tensor:
        """The logarithms by which heads forget, fp32 [H]: as ALiBi's slopes, and the slower the later the layer."""
        slopes = 2.0 ** (-8.0 / self.num_heads * torch.arange(1, self.num_heads + 1, device="cpu"))
        return slopes * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


class LightningAttention(StateLayer):
    """Stands where other layers attend; all projections of a token are one product."""

    def __init__(
        self, ctx: BuildContext, hidden_size: int, settings: LightningSettings, rates: torch.Tensor, layer_index: int
    ) -> None:
        """`rates`: fp32 [H], of all heads."""
        super().__init__(ctx, layer_index)
        s, tp = settings, ctx.groups.tp
        own, width = tp.share_of(s.num_heads, "num_attention_heads"), s.num_heads * s.head_dim
        self.num_heads, self.head_dim, self.act = own, s.head_dim, activation(s.hidden_act)
        self.in_proj = MergedColumnLinear(ctx, hidden_size, dict.fromkeys(PARTS, width), bias=False)
        self.norm = GatedGroupNorm(
            ctx, self.in_proj.output_shares["in_proj_q"], 1, NORM_EPS, norms_first=True, sigmoid=True
        )
        self.out_proj = RowLinear(ctx, width, hidden_size, bias=False)
        self.log_rates = rates[tp.rank * own :][:own].log().to(ctx.device)
        self.zeros = torch.zeros(own, dtype=torch.float32, device=ctx.device)

    def state_spec(self) -> LayerStateSpec:
        """The state of each head [D, D]."""
        return LayerStateSpec((StateTensor((self.num_heads, self.head_dim, self.head_dim), self.state_dtype),))

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        return self.out_proj(self.run(self.in_proj.apart(x), ctx), epilogue)  # type: ignore[no-any-return]

    def recur(self, projected: SideBySide, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """See StateLayer."""
        width = self.num_heads * self.head_dim
        inner, gate = projected.split((3 * width, width))
        heads = self.act(inner).view(len(projected), 3, self.num_heads, self.head_dim)
        query, key, value = heads.unbind(1)
        space = SpaceInputs(
            x=value,
            b=key,
            c=query,
            dt=self.zeros.expand(len(projected), -1),
            a_log=self.log_rates,
            d=self.zeros,
            dt_bias=self.zeros,
            dt_limit=(1.0, 1.0),
        )
        out = self.ops.state_space(space, states[0], step).flatten(1)
        normed: torch.Tensor = self.norm(out, gate)
        return normed
