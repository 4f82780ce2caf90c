"""Defines what follows a linear layer's product, which one kernel may do together with it: the layers' one exit.

An epilogue knows both ways: joined to a product that is still to be made, where the device has such a kernel
(`LinearOps`), and after one that stands alone, or whose shares are summed over ranks first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from app.distributed.parallel_groups import RankGroup
from app.kernels.fused import FUSED_OPS, GatedActivation
from app.kernels.gemm import Activations, DeferredActivation, GatedRows, Inputs, LinearOps, WeightT, materialize
from app.kernels.moe import ExpertRows
from app.layers.activation import PLAIN_ACTIVATIONS, activation
from app.layers.context import BuildContext
from app.layers.norm import Norm

ResultT = TypeVar("ResultT", covariant=True)


class Epilogue(Protocol[ResultT]):
    """Does what may follow a product."""

    def read(self, x: Inputs) -> Inputs:
        """Returns the rows of x [T, K] that the product is made of, where not all are wanted behind it."""
        return x

    def joined(self, ops: LinearOps[WeightT], x: Inputs, weight: WeightT, bias: torch.Tensor | None) -> ResultT:
        """The product x [T, K] W^T + b with weight [N, K], and what follows."""

    def after(self, y: torch.Tensor) -> ResultT:
        """Does what follows the product y [T, N]."""

    def after_all_reduce(self, group: RankGroup, y: torch.Tensor) -> ResultT:
        """Does what follows the sum over the group's ranks of y [T, N], which may be overwritten."""
        return self.after(group.all_reduce(y))

    def summed(
        self, group: RankGroup, ops: LinearOps[WeightT], x: Inputs, weight: WeightT, bias: torch.Tensor | None
    ) -> ResultT:
        """The product x [T, K] W^T + b of each rank, their sum, and what follows."""
        return self.after_all_reduce(group, ops.linear(x, weight, bias))

    def after_experts(self, rows: ExpertRows) -> ResultT:
        """Does what follows the sum [T, N] of what experts gave."""
        return self.after(rows.materialize())


class Plain(Epilogue[torch.Tensor]):
    """The product itself; `rows`: of those of x alone."""

    def __init__(self, rows: torch.Tensor | None = None) -> None:
        self._rows = rows

    def read(self, x: Inputs) -> Inputs:
        """See Epilogue.read."""
        return x if self._rows is None else materialize(x).index_select(0, self._rows)

    def joined(self, ops: LinearOps[WeightT], x: Inputs, weight: WeightT, bias: torch.Tensor | None) -> torch.Tensor:
        """The product alone, [T, N]."""
        return ops.linear(x, weight, bias)

    def after(self, y: torch.Tensor) -> torch.Tensor:
        """y as it is, [T, N]."""
        return y


class Act(Epilogue[torch.Tensor]):
    """An activation, [T, N]."""

    def __init__(self, ctx: BuildContext, name: str) -> None:
        self._act, self._plain = activation(name), PLAIN_ACTIVATIONS.get(name)
        plain, activate = self._plain, ctx.kernels(FUSED_OPS).activate
        if plain is not None and activate is not None:
            self._act = lambda x: activate(x, plain)

    def joined(self, ops: LinearOps[WeightT], x: Inputs, weight: WeightT, bias: torch.Tensor | None) -> torch.Tensor:
        """[T, N]."""
        if self._plain is None or ops.activated_linear is None:
            return self._act(ops.linear(x, weight, bias))
        return ops.activated_linear(x, weight, bias, self._plain)

    def after(self, y: torch.Tensor) -> torch.Tensor:
        """[T, N]."""
        return self._act(y)


class ActMul(Epilogue[GatedRows]):
    """Gate and up side by side (GLU variants: Shazeer, 2020): activation(gate) * up, [T, N / 2], which may be left to
    the product that reads it."""

    def __init__(self, ctx: BuildContext, act: GatedActivation) -> None:
        self._act_and_mul = ctx.kernels(FUSED_OPS).act_and_mul
        self._activation = act

    def joined(self, ops: LinearOps[WeightT], x: Inputs, weight: WeightT, bias: torch.Tensor | None) -> GatedRows:
        """[T, N / 2]."""
        x = x.materialize() if isinstance(x, DeferredActivation) else x
        return ops.gated_linear(x, weight, bias, self._activation)

    def after(self, y: torch.Tensor) -> torch.Tensor:
        """[T, N / 2]."""
        return self._act_and_mul(y, self._activation)


@dataclass(slots=True)
class AddNorm(Epilogue[tuple[Activations, torch.Tensor]]):
    """The residual stream: (norm of the sum, sum), both [T, N]; no norm: the sum twice."""

    residual: torch.Tensor  # [T, N]
    norm: Norm | None
    scale: float = 1.0  # of the product
    first: Norm | None = None  # norms the product before it is added
    rows: torch.Tensor | None = None  # int [N]: those of x to make the product of; None: all

    def of(self, rows: torch.Tensor | None) -> AddNorm:
        """The same for these rows alone, int [N], of x and of the residual; None: for all."""
        if rows is None:
            return self
        return AddNorm(self.residual.index_select(0, rows), self.norm, self.scale, self.first, rows)

    def read(self, x: Inputs) -> Inputs:
        """See Epilogue.read."""
        return x if self.rows is None else materialize(x).index_select(0, self.rows)

    def joined(
        self, ops: LinearOps[WeightT], x: Inputs, weight: WeightT, bias: torch.Tensor | None
    ) -> tuple[Activations, torch.Tensor]:
        """Sum with the product, and its norm."""
        if self.norm is None or self.first is not None or self.scale != 1.0:
            return self.after(ops.linear(x, weight, bias))
        return self.norm.after_product(ops, x, weight, bias, self.residual)

    def after(self, y: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """Sum with y, and its norm."""
        y = y if self.scale == 1.0 else y * self.scale
        if self.norm is None:
            total = y + self.residual if self.first is None else self.first.then_add(y, self.residual)
            return total, total
        return self.norm.after_add(y, self.residual, self.first)

    def after_all_reduce(self, group: RankGroup, y: torch.Tensor) -> tuple[Activations, torch.Tensor]:
        """Sum with all ranks' y, and its norm: what reads y is the next launch."""
        if self.norm is None or self.first is not None or self.scale != 1.0:
            return self.after(group.all_reduce(y, lent=True))
        return self.norm.after_sum(group, y, self.residual)

    def summed(
        self, group: RankGroup, ops: LinearOps[WeightT], x: Inputs, weight: WeightT, bias: torch.Tensor | None
    ) -> tuple[Activations, torch.Tensor]:
        """Sum with all ranks' products, and its norm."""
        if self.norm is None or self.first is not None or self.scale != 1.0:
            return self.after_all_reduce(group, ops.linear(x, weight, bias))
        return self.norm.after_summed_product(group, ops, x, weight, bias, self.residual)

    def after_experts(self, rows: ExpertRows) -> tuple[Activations, torch.Tensor]:
        """Sum with what experts gave, and its norm."""
        if self.norm is None or self.first is not None or self.scale != 1.0:
            return self.after(rows.materialize())
        return self.norm.after_experts(rows, self.residual)


PLAIN = Plain()
