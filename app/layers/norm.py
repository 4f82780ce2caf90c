"""Norms of the residual stream."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from app.distributed.parallel_groups import RankGroup
from app.kernels.fused import FUSED_OPS
from app.kernels.gemm import Activations, DeferredNorm, Inputs, LinearOps, WeightT
from app.kernels.moe import ExpertRows
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.weight import REPLICATED, Weight


class Norm(Layer, ABC):
    """A norm over the last dimension, and the ways to make it together with the sum that it norms."""

    weight: Weight

    @abstractmethod
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., C] -> [..., C]."""

    def then_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x and residual [T, C] -> the norm of x + residual."""
        normed: torch.Tensor = self(x)
        return normed + residual

    def after_add(
        self, x: torch.Tensor, residual: torch.Tensor, first: Norm | None = None
    ) -> tuple[Activations, torch.Tensor]:
        """x and residual [T, C] -> (the norm of their sum, the sum); `first` norms x before that."""
        total = x + residual if first is None else first.then_add(x, residual)
        return self(total), total

    def after_product(
        self,
        ops: LinearOps[WeightT],
        x: Inputs,
        weight: WeightT,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> tuple[Activations, torch.Tensor]:
        """The same of a product x [T, K] W^T + b and residual [T, C]."""
        return self.after_add(ops.linear(x, weight, bias), residual)

    def after_sum(self, group: RankGroup, y: torch.Tensor, residual: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """The same of the sum over the ranks of y [T, C], and residual."""
        return self.after_add(group.all_reduce(y, lent=True), residual)

    def after_summed_product(
        self,
        group: RankGroup,
        ops: LinearOps[WeightT],
        x: Inputs,
        weight: WeightT,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> tuple[Activations, torch.Tensor]:
        """The same of the sum over the ranks of a product x [T, K] W^T + b, and residual."""
        return self.after_sum(group, ops.linear(x, weight, bias), residual)

    def after_experts(self, rows: ExpertRows, residual: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """The same of the sum of what experts gave, and residual [T, C]."""
        return self.after_add(rows.materialize(), residual)


class RMSNorm(Norm):
    """x / rms(x) * weight (Zhang and Sennrich, 2019), the statistics in fp32.

    `may_defer`: its only reader is a linear layer, which can divide by rms(x) afterwards (`DeferredNorm`).
    """

    before_product = False  # whether one product alone reads it, which may take numbers of 8 bits

    def __init__(self, ctx: BuildContext, size: int, eps: float, *, may_defer: bool = False) -> None:
        super().__init__()
        self.may_defer = may_defer
        self.weight = Weight(torch.ones(size, dtype=ctx.dtype), REPLICATED)
        self.eps = eps
        self.fused = ctx.kernels(FUSED_OPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., C] -> [..., C]."""
        return self.fused.rms_norm(x, self.weight, self.eps)

    def then_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of x + residual; one kernel on a GPU."""
        return self.fused.add_rms_norm(x, residual, None, self.eps, self.weight)[1]

    def after_add(
        self, x: torch.Tensor, residual: torch.Tensor, first: Norm | None = None
    ) -> tuple[Activations, torch.Tensor]:
        """The norm of x + residual, and the sum; one kernel on a GPU, with an RMS norm of x `first` too."""
        if first is None:
            return self.fused.add_rms_norm(x, residual, self.weight, self.eps)
        if not isinstance(first, RMSNorm) or first.eps != self.eps:
            return super().after_add(x, residual, first)
        return self.fused.add_rms_norm(x, residual, self.weight, self.eps, first.weight)

    def after_product(
        self,
        ops: LinearOps[WeightT],
        x: Inputs,
        weight: WeightT,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> tuple[Activations, torch.Tensor]:
        """The norm of the product + residual, and the sum; one kernel on a GPU where rows are few."""
        rows = x.materialize() if isinstance(x, DeferredNorm) else x
        if self.before_product and ops.linear_add_numbers is not None:
            return ops.linear_add_numbers(rows, weight, bias, residual, self.weight, self.eps, self.may_defer)
        return ops.linear_add_norm(rows, weight, bias, residual, self.weight, self.eps, self.may_defer)

    def after_sum(self, group: RankGroup, y: torch.Tensor, residual: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """The norm of the sum + residual, and that sum; one kernel on GPUs of a host where rows are few."""
        together = self.fused.sum_add_norm
        if group.boxes is not None and together is not None:
            found = together(group.boxes, y, residual, self.weight, self.eps)
            if found is not None:
                return found
        return super().after_sum(group, y, residual)

    def after_summed_product(
        self,
        group: RankGroup,
        ops: LinearOps[WeightT],
        x: Inputs,
        weight: WeightT,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> tuple[Activations, torch.Tensor]:
        """The norm of the sum + residual, and that sum; one kernel on GPUs of a host where rows are few."""
        if group.boxes is not None and ops.linear_sum_norm is not None and self.may_defer:
            rows = x.materialize() if isinstance(x, DeferredNorm) else x
            found = ops.linear_sum_norm(group.boxes, rows, weight, bias, residual, self.weight, self.eps)
            if found is not None:
                return found
        return super().after_summed_product(group, ops, x, weight, bias, residual)

    def after_experts(self, rows: ExpertRows, residual: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """The norm of the sum + residual, and that sum; one kernel on a GPU."""
        return rows.add_norm(residual, self.weight, self.eps, self.may_defer)
