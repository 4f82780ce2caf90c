"""Turns a layer's loaded weight into what multiplies, as exact as `deterministic` asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from app.checkpoints.tensors.leaf import Share
from app.kernels.gemm import LinearOps, PackedWeight
from app.kernels.gemm.fixed_rows import FixedRowsWeight
from app.layers.context import BuildContext
from app.layers.leaves import LeafColumns

Pack = Callable[[], PackedWeight | None]  # None: the plain tensor does, as it is


@dataclass(slots=True, frozen=True)
class Packing:
    """One layer's."""

    ops: LinearOps[torch.Tensor]  # with the plain tensor
    dtype: torch.dtype
    is_exact: bool  # rows do not depend on those beside them,
    has_leaves: bool  # nor on the number of ranks

    @classmethod
    def of(cls, ctx: BuildContext, ops: LinearOps[torch.Tensor]) -> Packing:
        """That of a layer made with `ctx`."""
        return cls(ops, ctx.dtype, ctx.is_exact, ctx.has_leaves)

    def packed(self, whole: Pack, leaves: Pack, num_outputs: int, num_inputs: int) -> PackedWeight | None:
        """The weight [outputs, inputs] as `whole` packs it, or as `leaves` does where ranks must not tell."""
        return leaves() if self.has_leaves else self.by_rows(whole(), num_outputs, num_inputs)

    def by_rows(self, packed: PackedWeight | None, num_outputs: int, num_inputs: int) -> PackedWeight | None:
        """A packed weight [outputs, inputs], whose products treat each row like all others where they must."""
        return FixedRowsWeight.of(packed, (num_outputs, num_inputs), self.dtype) if self.is_exact else packed

    def columns(self, weight: torch.Tensor, shares: Iterable[Share]) -> PackedWeight | None:
        """Leaves of a weight [N, K] of which ranks share the outputs: it is cut where products go by its shape."""
        return LeafColumns.of(weight, shares) if self.ops.goes_by_shape else None
