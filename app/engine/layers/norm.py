"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from app.engine.layers.context import BuildContext
from app.engine.layers.weight import REPLICATED, Weight
from app.kernels.fused import fused_ops


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, the statistics in fp32.

    `may_be_late`: its only reader is a linear layer, which can divide by rms(x) afterwards (`LateNorm`).
    """

    def __init__(self, ctx: BuildContext, size: int, eps: float, *, may_be_late: bool = False) -> None:
        super().__init__()
        self.may_be_late = may_be_late
        self.weight = Weight(torch.ones(size, dtype=ctx.dtype), REPLICATED)
        self.size = (size,)
        self.eps = eps
        self.fused = fused_ops(ctx.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., C] -> [..., C]."""
        return F.rms_norm(x, self.size, self.weight, self.eps)

    def after_add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x and residual [T, C] -> (the norm of their sum, the sum): one kernel on a GPU."""
        return self.fused.add_rms_norm(x, residual, self.weight, self.eps)
