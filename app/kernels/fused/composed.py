"""Fused functions that are made of a norm and a rotation, whichever bits these two have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from app.kernels.attention import HeadNorm


@dataclass(slots=True, frozen=True)
class Composed:
    """Holds the norm and the rotation, with the layouts of FusedOps."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        input_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(s) * weight, s), s = x, normed if there is an input_weight, + residual; all [T, C]."""
        total = (x if input_weight is None else self.rms_norm(x, input_weight, eps)) + residual
        return (total if weight is None else self.rms_norm(total, weight, eps)), total

    def rotate_heads(
        self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: HeadNorm | None, num_queries: int
    ) -> None:
        """heads [T, H, D], queries first, then keys, are normed and rotated in place."""
        if norm is None:
            heads.copy_(self.rotate(heads, cos, sin))
            return
        query, key = heads[:, :num_queries], heads[:, num_queries:]
        query.copy_(self.rotate(self.rms_norm(query, norm.query_weight, norm.eps), cos, sin))
        key.copy_(self.rotate(self.rms_norm(key, norm.key_weight, norm.eps), cos, sin))
