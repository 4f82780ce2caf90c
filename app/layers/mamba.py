"""Mamba (Gu and Dao, 2023): a selective state space of single channels, each of which decays by a rate of its own.

Projections of a token go through a short convolution, which says its dt, B and C. Ranks of a tensor-parallel group
split the channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from app.checkpoints.tensors.leaf import Share
from app.kernels.gemm import Activations
from app.kernels.recurrent import ScanInputs, StateStep
from app.layers.cache_spec import LayerStateSpec, StateTensor
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.linear import ColumnLinear, MergedColumnLinear, RowLinear
from app.layers.norm import RMSNorm
from app.layers.short_conv import HeadNumbers, ShortConv
from app.layers.side_by_side import SideBySide
from app.layers.state_layer import StateLayer
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape

PARTS = ("in_proj_x", "in_proj_z")
InnerNorms = Literal["none", "unit", "weighted"]  # of dt, B and C: FalconMamba's have no weights, Jamba's have


@dataclass(slots=True, frozen=True)
class MambaSettings:
    """The shape of one layer, before it is split over ranks."""

    channels: int
    state_size: int
    dt_rank: int
    conv_width: int
    conv_bias: bool
    bias: bool  # of the projections in and out
    inner_norms: InnerNorms = "none"
    norm_eps: float = 1e-6


class Mamba(StateLayer):
    """Stands where other layers attend."""

    recurs_through_products = True

    def __init__(self, ctx: BuildContext, hidden_size: int, settings: MambaSettings, layer_index: int) -> None:
        super().__init__(ctx, layer_index)
        s = self.settings = settings
        self.in_proj = MergedColumnLinear(ctx, hidden_size, dict.fromkeys(PARTS, s.channels), s.bias)
        share = self.in_proj.output_shares["in_proj_x"]
        self.channels = Share(0, share.size, share.start, share.whole)
        self.conv1d = ShortConv(ctx, [share], s.conv_width, bias=s.conv_bias)
        self.parts = [s.dt_rank, s.state_size, s.state_size]
        self.x_proj = RowLinear(ctx, s.channels, sum(self.parts), bias=False)
        self.dt_proj = ColumnLinear(ctx, s.dt_rank, s.channels, bias=True)
        spec = WeightSpec(self.load_decays, dummy=0.0)
        self.A_log = Weight(torch.empty(share.size, s.state_size, dtype=torch.float32), spec)
        self.D = HeadNumbers(self.channels).weight(1.0)
        self.no_bias = torch.zeros(share.size, device=ctx.device)  # the projection has added its own
        if s.inner_norms == "weighted":
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
                RMSNorm(ctx, size, s.norm_eps) for size in self.parts
            )
        self.out_proj = RowLinear(ctx, s.channels, hidden_size, s.bias)

    def load_decays(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load this rank's channels."""
        expect_shape(tensor, self.channels.whole, weight.shape[1])
        weight.data.copy_(tensor.narrow(0, self.channels.start, self.channels.size))

    def state_spec(self) -> LayerStateSpec:
        """The last inputs of the convolution, and the states of each channel [N]."""
        state = StateTensor((self.channels.size, self.settings.state_size), self.state_dtype)
        return LayerStateSpec((self.conv1d.state, state))

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        return self.out_proj(self.run(self.in_proj.apart(x), ctx), epilogue)  # type: ignore[no-any-return]

    def recur(self, projected: SideBySide, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """See StateLayer."""
        inputs, of_channels = states
        mixed, gate = projected.split((self.channels.size,) * 2)
        mixed = self.conv1d(mixed, inputs, step)
        dt, b, c = self._normed(torch.split(self.x_proj(mixed), self.parts, dim=1))
        scan = ScanInputs(mixed, b, c, self.dt_proj(dt), self.A_log, self.D, self.no_bias)
        out: torch.Tensor = self.ops.selective_scan(scan, of_channels, step)
        return (out.float() * F.silu(gate.float())).to(out.dtype)

    def _normed(self, parts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        kind, eps = self.settings.inner_norms, self.settings.norm_eps
        if kind == "none":
            return [parts[0].contiguous(), *parts[1:]]
        if kind == "unit":
            return [F.rms_norm(part, part.shape[1:], None, eps) for part in parts]
        norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
        return [norm(part.contiguous()) for norm, part in zip(norms, parts, strict=True)]
