"""Rotary position embedding (RoPE: Su et al., 2021): rotates the two halves of a head by angles that grow with the
position.

The cosines and sines of all positions are computed once, in fp32; a step gathers its own and every layer reuses them.
Which frequencies: app/layers/rope_scaling.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.kernels.fused.reference import rotate
from app.layers.context import ForwardContext
from app.layers.rope_scaling import RopeSettings

# Positions to rotate by, where they are not the tokens' own: int64 [T] or [T, 3] among what features bring.
ROPE_POSITIONS = "rope_positions"


@dataclass(slots=True, frozen=True)
class Rotation:
    """Cosines and sines of the step's tokens."""

    cos: torch.Tensor  # [T, 1, D]
    sin: torch.Tensor  # [T, 1, D], the first half negated
    query_scale: torch.Tensor | None = None  # [T, 1, 1]: queries are multiplied by it afterwards

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> [T, H, D]; layers leave it to `FusedOps.rotate_and_write`."""
        return rotate(x, self.cos, self.sin)


class RotaryEmbedding:
    """Table of angles for positions 0 .. max_model_len - 1. Not a module: it holds nothing to load."""

    def __init__(self, settings: RopeSettings, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        inv_freq, scale = settings.frequencies()
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32, device="cpu"), inv_freq)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self.cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype)
        scales = settings.query_scales(max_model_len)
        axes = settings.axes()
        self.axes = None if axes is None else axes.repeat(2).to(device)  # [D]
        self.query_scales = None if scales is None else scales.to(device=device, dtype=dtype)

    def of_step(self, ctx: ForwardContext) -> Rotation:
        """Angles of the step's tokens: gathered when the first layer asks."""
        rotation: Rotation | None = ctx.memo.get(self)
        if rotation is None:
            positions = ctx.positions if self.axes is None else ctx.inputs.get(ROPE_POSITIONS, ctx.positions)
            ctx.memo[self] = rotation = self.at(positions)
        return rotation

    def at(self, positions: torch.Tensor) -> Rotation:
        """Angles of the step's tokens, positions int64 [T], or [T, 3] where each has three coordinates."""
        if positions.ndim > 1:
            return self._of_axes(positions)
        scale = None if self.query_scales is None else self.query_scales[positions].view(-1, 1, 1)
        return Rotation(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1), scale)

    def _of_axes(self, positions: torch.Tensor) -> Rotation:
        assert self.axes is not None
        chosen = self.axes.expand(len(positions), 1, -1)  # of [T, 3, D], along the coordinates
        return Rotation(self.cos[positions].gather(1, chosen), self.sin[positions].gather(1, chosen))
