"""The groups of ranks that share a layer (TP) or a stack of layers (PP).

A group of one costs nothing: its collectives return their argument. Tensors between ranks travel through
torch.distributed only, never through the letters (I2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(slots=True, frozen=True)
class RankGroup:
    """`size` ranks, of which this process is number `rank`."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None  # None at size 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.size == 1 or self.handle is not None, "several ranks need a process group"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors, all of one shape, along `dim`."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.handle)
        return torch.cat(parts, dim=dim)

    def share_of(self, total: int, what: str) -> int:
        """`total` divided by the size; `what` names it should it not divide (the configuration is checked before)."""
        assert total % self.size == 0, f"{what}={total} does not divide by {self.size} ranks"
        return total // self.size


@dataclass(slots=True, frozen=True)
class ParallelGroups:
    """Every group this rank belongs to."""

    world: RankGroup = RankGroup()
    tp: RankGroup = RankGroup()
    pp: RankGroup = RankGroup()
