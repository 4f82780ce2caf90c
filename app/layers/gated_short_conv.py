"""LFM2's layer in attention's place: a short convolution between two gates, which keeps its last inputs alone."""

from __future__ import annotations

import torch

from app.kernels.gemm import Activations
from app.kernels.recurrent import StateStep
from app.layers.cache_spec import LayerStateSpec
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.linear import MergedColumnLinear, RowLinear
from app.layers.short_conv import ShortConv
from app.layers.side_by_side import SideBySide
from app.layers.state_layer import StateLayer

PARTS = ("in_proj_b", "in_proj_c", "in_proj_x")


class GatedShortConv(StateLayer):
    """c * conv(b * x), of three projections. Ranks split the channels."""

    def __init__(self, ctx: BuildContext, hidden_size: int, width: int, bias: bool, layer_index: int) -> None:
        super().__init__(ctx, layer_index)
        self.in_proj = MergedColumnLinear(ctx, hidden_size, dict.fromkeys(PARTS, hidden_size), bias)
        self.width = self.in_proj.output_shares["in_proj_b"].size
        self.conv = ShortConv(ctx, [self.in_proj.output_shares["in_proj_b"]], width, bias=bias, activate=False)
        self.out_proj = RowLinear(ctx, hidden_size, hidden_size, bias)

    def state_spec(self) -> LayerStateSpec:
        """The last inputs of the convolution."""
        return LayerStateSpec((self.conv.state,))

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        return self.out_proj(self.run(self.in_proj.apart(x), ctx), epilogue)  # type: ignore[no-any-return]

    def recur(self, projected: SideBySide, states: tuple[torch.Tensor, ...], step: StateStep) -> torch.Tensor:
        """See StateLayer."""
        b, c, y = projected.split((self.width,) * 3)
        convolved: torch.Tensor = self.conv(b * y, states[0], step)
        return c * convolved
