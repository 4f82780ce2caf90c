"""Which experts a rank holds, and how wide a share of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.engine.distributed.parallel_groups import ParallelGroups
from app.errors import ConfigError


@dataclass(slots=True, frozen=True)
class ExpertShare:
    """Whole experts (expert parallelism) or a share of the width of all: the rank's sums are part of the output."""

    num_experts: int  # of the model
    held: range  # those of this rank
    width: int  # of an expert, on this rank
    first: int  # of the width: this rank's begin

    @classmethod
    def of(cls, groups: ParallelGroups, num_experts: int, intermediate_size: int) -> ExpertShare:
        """This rank's. Experts that do not divide are dealt as evenly as can be; ConfigError for a width that does
        not."""
        ep, tp = groups.ep, groups.tp
        if ep.size > 1:
            ends = [num_experts * (rank + 1) // ep.size for rank in range(ep.size)]
            return cls(num_experts, range(ends[ep.rank - 1] if ep.rank else 0, ends[ep.rank]), intermediate_size, 0)
        if intermediate_size % tp.size:
            raise ConfigError(
                f"tensor_parallel_size={tp.size} does not divide the experts' width {intermediate_size}; "
                "enable_expert_parallel leaves experts whole",
                param="tensor_parallel_size",
            )
        width = intermediate_size // tp.size
        return cls(num_experts, range(num_experts), width, tp.rank * width)

    def places(self, device: torch.device) -> torch.Tensor | None:
        """The number of each expert of the model among those of this rank, -1 for others and behind them all: int32
        [E + 1]; None where the rank has all."""
        if len(self.held) == self.num_experts:
            return None
        places = torch.full((self.num_experts + 1,), -1, dtype=torch.int32, device="cpu")
        places[self.held.start : self.held.stop] = torch.arange(len(self.held), dtype=torch.int32, device="cpu")
        return places.to(device)
