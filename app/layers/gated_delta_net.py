"""Gated delta nets (Yang et al., 2024): a head's state maps keys to values, forgets by a gate, and is corrected by what
it gets wrong about each new token.

Projections of a token go through a short convolution; queries and keys are normed; what the state answers is normed and
gated. Ranks of a tensor-parallel group split the heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.checkpoints.tensors.leaf import Share
from app.kernels.gemm import Activations
from app.kernels.recurrent import DeltaGates, DeltaHeads, GatedNorm, StateStep
from app.layers.cache_spec import LayerStateSpec, StateTensor
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.linear import MergedColumnLinear, RowLinear
from app.layers.norm import RMSNorm
from app.layers.short_conv import HeadNumbers, ShortConv
from app.layers.side_by_side import SideBySide
from app.layers.state_layer import StateLayer

CONV_PARTS = ("q_conv1d", "k_conv1d", "v_conv1d")  # names in checkpoints that have them apart


@dataclass(slots=True, frozen=True)
class DeltaSettings:
    """The shape of one layer, before it is split over ranks."""

    heads: DeltaHeads
    conv_width: int
    norm_eps: float
    rate_scale: float = 1.0
    splits_conv: bool = False  # a checkpoint has the convolutions of queries, keys and values apart


class GatedDeltaNet(StateLayer):
    """Stands where other layers attend; all projections of a token are one product, or as many as are stored unlike."""

    def __init__(self, ctx: BuildContext, hidden_size: int, settings: DeltaSettings, layer_index: int) -> None:
        super().__init__(ctx, layer_index)
        whole, tp = settings.heads, ctx.groups.tp
        keys = tp.share_of(whole.num_keys, "linear_num_key_heads")
        values = tp.share_of(whole.num_values, "linear_num_value_heads")
        self.heads = DeltaHeads(keys, values, whole.key_dim, whole.value_dim)
        names = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a")
        q, k, v = whole.widths
        sizes = dict(zip(names, (q, k, v, v, whole.num_values, whole.num_values), strict=True))
        self.in_proj = MergedColumnLinear(ctx, hidden_size, sizes, bias=False)
        shares = self.in_proj.output_shares
        convolved, apart = [shares[name] for name in names[:3]], CONV_PARTS if settings.splits_conv else ()
        self.conv1d = ShortConv(ctx, convolved, settings.conv_width, bias=False, parts=apart)
        self.parts = [sum(self.heads.widths), self.heads.widths[2], values, values]
        of_heads = HeadNumbers(Share(0, values, tp.rank * values, whole.num_values))
        self.A_log, self.dt_bias = of_heads.weight(0.0), of_heads.weight(0.0)
        self.norm = RMSNorm(ctx, whole.value_dim, settings.norm_eps)
        self.out_proj = RowLinear(ctx, v, hidden_size, bias=False)
        self.rate_scale = settings.rate_scale

    def state_spec(self) -> LayerStateSpec:
        """The last inputs of the convolution, and the state of each value head [Dv, Dk]."""
        h = self.heads
        state = StateTensor((h.num_values, h.value_dim, h.key_dim), self.state_dtype)
        return LayerStateSpec((self.conv1d.state, state))

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        return self.out_proj(self.run(self.in_proj.apart(x), ctx), epilogue)  # type: ignore[no-any-return]

    def recur(self, projected: SideBySide, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """See StateLayer."""
        inputs, of_heads = states
        mixed, z, b, a = projected.split(self.parts)
        mixed = self.conv1d(mixed, inputs, step)
        gates = DeltaGates(a, b, self.A_log, self.dt_bias, self.rate_scale)
        norm = GatedNorm(z, self.norm.weight, self.norm.eps)
        out: torch.Tensor = self.ops.gated_delta(mixed, self.heads, gates, norm, of_heads, step)
        return out
