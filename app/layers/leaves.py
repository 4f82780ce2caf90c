"""Weights whose products have the same bits on any number of ranks (`deterministic: batch_and_layout`).

Where ranks share the outputs, a library that chooses its sums by the shape of a product is handed shapes that no number
of ranks changes; kernels of ours do not look at them. Where ranks share the inputs, sums go over fixed leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from app.checkpoints.tensors.leaf import Share
from app.distributed.parallel_groups import RankGroup
from app.kernels.gemm import PackedWeight
from app.kernels.gemm.fixed_rows import linear
from app.kernels.gemm.leaves import LEAF_PRODUCTS, LEAVES, LeafProduct, add_neighbours, cut


@dataclass(slots=True, frozen=True)
class LeafColumns(PackedWeight):
    """A rank's share of the outputs, in pieces [n, K] of sizes that do not depend on the number of ranks."""

    pieces: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, weight: torch.Tensor, shares: Iterable[Share]) -> LeafColumns:
        """weight [N, K], whose rows are these shares, each a number of LEAVES-ths of a whole."""
        sizes = [share.whole // LEAVES for share in shares for _ in range(share.size * LEAVES // share.whole)]
        return cls(tuple(piece.clone() for piece in torch.split(weight, sizes)))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias, [T, N]."""
        out = torch.cat([linear(x, piece, None) for piece in self.pieces], dim=1)
        return out if bias is None else out.add_(bias)


@dataclass(slots=True, frozen=True)
class LeafRows(PackedWeight):
    """A rank's share of the inputs, whose product is summed up with the other ranks'."""

    leaves: torch.Tensor  # [leaves of this rank, N, inputs of a leaf]
    group: RankGroup
    product: LeafProduct

    @classmethod
    def of(cls, weight: torch.Tensor, group: RankGroup) -> LeafRows:
        """weight [N, K]: this rank's of a whole [N, K x ranks]."""
        product = LEAF_PRODUCTS.on(weight.device, exact=True)
        return cls(cut(weight, LEAVES // group.size), group, product)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> the sum over the ranks of x W^T + bias, [T, N], the same on all; zeros are the bias of all but
        the first."""
        if self.group.size == 1:
            return self.product(x, self.leaves, bias, x.dtype)
        own = self.product(x, self.leaves, bias, torch.float32)
        return add_neighbours(self.group.all_gather(own.unsqueeze(0), dim=0)).to(x.dtype)
