"""Decides which experts a rank holds, and how wide a share of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.errors import ConfigError
from app.layers.context import BuildContext
from app.layers.experts.placement import Slots, first_slots

NOBODY = -1  # in a slot without an expert


@dataclass(slots=True, frozen=True)
class ExpertShare:
    """Whole experts (expert parallelism) or a share of the width of all: the rank's sums are part of the output."""

    num_experts: int  # of the model
    slots: Slots  # [R, S]: the experts of all ranks that hold whole ones, as the checkpoint fills them
    rank: int  # among those
    width: int  # of an expert, on this rank
    first: int  # of the width: this rank's begin
    moves: bool = False  # whether experts may move between slots

    @classmethod
    def of(cls, ctx: BuildContext, num_experts: int, intermediate_size: int) -> ExpertShare:
        """This rank's. Experts that do not divide are dealt as evenly as can be. ConfigError for a width that does not
        divide."""
        ep, tp, copies = ctx.groups.ep, ctx.groups.tp, ctx.redundant_experts
        if ep.size > 1:
            moves = copies is not None
            slots = _dealt(num_experts, ep.size) if copies is None else first_slots(num_experts, ep.size, copies)
            return cls(num_experts, slots, ep.rank, intermediate_size, 0, moves)
        if intermediate_size % tp.size:
            raise ConfigError(
                f"tensor_parallel_size={tp.size} does not divide the experts' width {intermediate_size}; "
                "enable_expert_parallel leaves experts whole",
                param="tensor_parallel_size",
            )
        width = intermediate_size // tp.size
        return cls(num_experts, np.arange(num_experts)[None], 0, width, tp.rank * width)

    @property
    def held(self) -> list[int]:
        """The experts in this rank's slots, in their order."""
        return [expert for expert in self.slots[self.rank].tolist() if expert != NOBODY]


def _dealt(num_experts: int, num_ranks: int) -> Slots:
    """Each expert once, in order."""
    ends = [num_experts * (rank + 1) // num_ranks for rank in range(num_ranks)]
    slots = np.full((num_ranks, -(-num_experts // num_ranks)), NOBODY, dtype=np.int64)
    for rank, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        slots[rank, : end - first] = np.arange(first, end)
    return slots
