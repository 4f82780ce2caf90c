"""The groups of ranks that share a layer (TP) or a stack of layers (PP).

A group of one costs nothing: its collectives return their argument. Tensors between ranks travel through
torch.distributed only, never through the step messages (I2). How the groups are made: process_groups.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from app.kernels.fused import RankBoxes

# The one name since torch 2.13, the other before.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SmallAllReduce = Callable[[torch.Tensor, bool], "torch.Tensor | None"]


@dataclass(slots=True, frozen=True)
class RankGroup:
    """`size` ranks, of which this process is number `rank`.

    `handle` serves both kinds of tensors: NCCL those on GPUs, gloo those on the host.
    """

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None  # None at size 1
    # A faster sum for the messages it takes, as `all_reduce`; None for those it leaves to `handle`.
    small_all_reduce: SmallAllReduce | None = None
    # Where kernels of the ranks leave each other their parts of a sum; None: they cannot.
    boxes: RankBoxes | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.size == 1 or self.handle is not None, "several ranks need a process group"

    @classmethod
    def unconnected(cls, rank: int, size: int) -> RankGroup:
        """A rank that another process plays by itself: it has a share of the model, and sends nothing."""
        if size == 1:
            return cls()
        return cls(rank, size, dist.ProcessGroup(dist.HashStore(), rank, size))  # type: ignore[attr-defined]

    def all_reduce(self, tensor: torch.Tensor, *, lent: bool = False) -> torch.Tensor:
        """Sum over the ranks, in place; the same bits on every rank. `lent`: whoever calls reads the answer at once, so
        that it may lie in memory which the group's next sum overwrites."""
        if self.size > 1:
            if self.small_all_reduce is not None and (summed := self.small_all_reduce(tensor, lent)) is not None:
                return summed
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors, all of one shape, along `dim`."""
        if self.size == 1:
            return tensor
        parts = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        _all_gather(parts, tensor.contiguous(), group=self.handle)
        return torch.cat(parts.chunk(self.size), dim=dim)

    def agree(self, is_ready: bool, device: torch.device) -> bool:
        """Asks whether every rank is ready: one that is not would leave the others waiting in every sum. Collective."""
        if self.size == 1:
            return is_ready
        votes = torch.tensor([int(is_ready)], device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.handle)
        return bool(votes.item())

    def share_of(self, total: int, what: str) -> int:
        """`total` divided by the size; `what` names it should it not divide (parallel_plan.py checks it before)."""
        assert total % self.size == 0, f"{what}={total} does not divide by {self.size} ranks"
        return total // self.size


@dataclass(slots=True, frozen=True)
class ParallelGroups:
    """Every group this rank belongs to. Rank = stage * tp.size + rank within the stage.

    `feedback` has the members of `pp` and a channel of its own: sampled tokens go back to the first stage on it while
    activations go forward on `pp`; on one channel, two neighbours that send to each other first would wait for ever.
    """

    tp: RankGroup = RankGroup()
    pp: RankGroup = RankGroup()
    feedback: RankGroup = RankGroup()
    # The ranks that hold whole experts: those of `tp`, on a channel of their own, as experts move beside sums. Size 1:
    # every rank of `tp` holds a share of all experts.
    ep: RankGroup = RankGroup()

    def with_whole_experts(self) -> ParallelGroups:
        """The same groups, in which a rank holds whole experts."""
        return replace(self, ep=self.tp)

    @property
    def is_first_stage(self) -> bool:
        """True if this rank embeds the tokens."""
        return self.pp.rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank computes logits and samples."""
        return self.pp.rank == self.pp.size - 1
