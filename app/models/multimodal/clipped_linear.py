"""Products within bounds that the checkpoint holds, as Gemma 4's encoders have them."""

from __future__ import annotations

import torch

from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.replicated import ReplicatedLinear
from app.layers.weight import REPLICATED, Weight

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class ClippedLinear(Layer):
    """A product of numbers within bounds, whose results are kept within bounds; or a plain one."""

    def __init__(self, ctx: BuildContext, inputs: int, outputs: int, is_clipped: bool) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(ctx, inputs, outputs, bias=False)
        self.is_clipped = is_clipped
        for name in BOUNDS if is_clipped else ():
            setattr(self, name, Weight(torch.empty(1, dtype=ctx.dtype), REPLICATED))

    input_min: Weight
    input_max: Weight
    output_min: Weight
    output_max: Weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] -> [T, outputs]."""
        if not self.is_clipped:
            return self.linear(x)  # type: ignore[no-any-return]
        product: torch.Tensor = self.linear(x.clamp(self.input_min, self.input_max))
        return product.clamp(self.output_min, self.output_max)
