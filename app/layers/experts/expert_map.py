"""From the model's number of an expert to the slot of this rank that holds it.

Where experts move, an expert may be in several slots: a token takes the copy that its position names, so that it takes
the same one alone and in a batch. The table is overwritten in place between steps, so that CUDA graphs see it.
"""

from __future__ import annotations

import numpy as np
import torch

from app.kernels.moe import MOE_OPS, Routing
from app.layers.experts.expert_share import NOBODY, ExpertShare
from app.layers.experts.placement import Slots
from app.platforms.to_device import to_device

COLUMNS = 60  # a position's remainder by this names the copy: divides evenly by 1 to 6 copies


class ExpertMap:
    """One layer's. Where experts move, it also counts the tokens of each."""

    def __init__(self, share: ExpertShare, device: torch.device) -> None:
        self.share, self.slots = share, share.slots
        self.columns = COLUMNS if share.moves else 1
        size = (share.num_experts, self.columns)
        self.table = torch.full(size, NOBODY, dtype=torch.int32, device="cpu").to(device)
        self.counts = torch.zeros(share.num_experts, dtype=torch.int64, device="cpu").to(device)
        self.to_slots = MOE_OPS.on(device).to_slots
        self.hold(share.slots)

    def hold(self, slots: Slots) -> None:
        """From now on the ranks' slots [R, S] hold these experts."""
        self.slots = slots
        places = slots.ravel()
        order = np.argsort(places, kind="stable")[int((places == NOBODY).sum()) :]  # by expert
        copies = np.bincount(places[order], minlength=self.share.num_experts)
        first = np.cumsum(copies) - copies
        turns = first[:, None] + np.arange(self.columns) % copies[:, None]
        rank, slot = np.divmod(order[turns], slots.shape[1])
        own = np.where(rank == self.share.rank, slot, NOBODY).astype(np.int32)
        self.table.copy_(to_device(own, self.table.device))

    def of_rank(self, routing: Routing, positions: torch.Tensor) -> Routing:
        """The same with slots of this rank, -1 for experts of others; positions int64 [T]."""
        more = (positions, self.counts) if self.share.moves else ()
        return routing._replace(ids=self.to_slots(routing.ids, self.table, *more))
