"""Kimi Delta Attention (arXiv 2510.26692): a gated delta net each of whose key channels forgets by a gate of its own.

The gates of channels and of what is given come through a narrow product, which every rank of a tensor-parallel group
makes whole; the ranks split the heads of all else.
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
from app.layers.gated_delta_net import CONV_PARTS
from app.layers.linear import ColumnLinear, MergedColumnLinear, RowLinear
from app.layers.norm import RMSNorm
from app.layers.short_conv import HeadNumbers, ShortConv
from app.layers.side_by_side import SideBySide
from app.layers.state_layer import StateLayer


@dataclass(slots=True, frozen=True)
class KimiDeltaSettings:
    """The shape of one layer, before it is split over ranks."""

    num_heads: int
    head_dim: int
    conv_width: int
    norm_eps: float


class KimiDeltaAttention(StateLayer):
    """Stands where other layers attend; names are those of checkpoints."""

    recurs_through_products = True

    def __init__(self, ctx: BuildContext, hidden_size: int, settings: KimiDeltaSettings, layer_index: int) -> None:
        super().__init__(ctx, layer_index)
        s, tp = settings, ctx.groups.tp
        own, width = tp.share_of(s.num_heads, "linear_attn_config.num_heads"), s.num_heads * s.head_dim
        self.heads = DeltaHeads(own, own, s.head_dim, s.head_dim)
        sizes = {"q_proj": width, "k_proj": width, "v_proj": width, "b_proj": s.num_heads}
        narrow = ("f_a_proj", "g_a_proj")
        sizes |= dict.fromkeys(narrow, s.head_dim)
        self.in_proj = MergedColumnLinear(ctx, hidden_size, sizes, False, dict.fromkeys(narrow, tp.size))
        shares = self.in_proj.output_shares
        self.parts = [sum(self.heads.widths), own, s.head_dim, s.head_dim]
        convolved = [shares[name] for name in ("q_proj", "k_proj", "v_proj")]
        self.conv1d = ShortConv(ctx, convolved, s.conv_width, bias=False, parts=CONV_PARTS)
        self.f_b_proj = ColumnLinear(ctx, s.head_dim, width, bias=False)
        self.g_b_proj = ColumnLinear(ctx, s.head_dim, width, bias=False)
        self.A_log = HeadNumbers(Share(0, own, tp.rank * own, s.num_heads)).weight(0.0)
        self.dt_bias = HeadNumbers(shares["q_proj"]).weight(0.0)
        self.o_norm = RMSNorm(ctx, s.head_dim, s.norm_eps)
        self.o_proj = RowLinear(ctx, width, hidden_size, bias=False)

    def state_spec(self) -> LayerStateSpec:
        """The last inputs of the convolution, and the state of each head [Dv, Dk]."""
        h = self.heads
        state = StateTensor((h.num_values, h.value_dim, h.key_dim), self.state_dtype)
        return LayerStateSpec((self.conv1d.state, state))

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        return self.o_proj(self.run(self.in_proj.apart(x), ctx), epilogue)  # type: ignore[no-any-return]

    def recur(self, projected: SideBySide, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """See StateLayer."""
        inputs, of_heads = states
        mixed, b, forget, gate = projected.split(self.parts)
        mixed = self.conv1d(mixed, inputs, step)
        gates = DeltaGates(self.f_b_proj(forget.contiguous()), b, self.A_log, self.dt_bias)
        norm = GatedNorm(self.g_b_proj(gate.contiguous()), self.o_norm.weight, self.o_norm.eps, sigmoid=True)
        out: torch.Tensor = self.ops.channel_delta(mixed, self.heads, gates, norm, of_heads, step)
        return out
