"""The gated feed-forward layer of Llama-like models."""

from __future__ import annotations

import torch
from torch import nn

from app.engine.layers.activation import activation
from app.engine.layers.context import BuildContext
from app.engine.layers.linear import MergedColumnLinear, RowLinear
from app.engine.layers.norm import RMSNorm
from app.kernels.gemm import Rows


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(
        self, ctx: BuildContext, hidden_size: int, intermediate_size: int, hidden_act: str, bias: bool
    ) -> None:
        super().__init__()
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedColumnLinear(ctx, hidden_size, sizes, bias)
        self.down_proj = RowLinear(ctx, intermediate_size, hidden_size, bias)
        self.act = activation(hidden_act)
        self.is_silu = hidden_act in ("silu", "swish")

    def forward(self, x: Rows, residual: torch.Tensor, norm: RMSNorm | None) -> tuple[Rows, torch.Tensor]:
        """x, residual [T, C] -> (the norm of the output added to the residual, that sum): `RowLinear.add_norm`."""
        if self.is_silu:
            return self.down_proj.add_norm(self.gate_up_proj.gated(x), residual, norm)
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj.add_norm(self.act(gate).mul_(up), residual, norm)
