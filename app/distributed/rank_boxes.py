"""Makes the boxes in which the ranks of a host leave each other their parts of sums (kernels/fused/triton_ranks.py)."""

from __future__ import annotations

import torch

from app.distributed.parallel_groups import RankGroup
from app.kernels.fused import RankBoxes

SETS = 2  # of boxes, which take turns
WORDS = 3 << 17  # of a box, two numbers each: beyond, two shots and a norm are as fast. Both sets: 6 MiB for each rank


def empty_boxes(group: RankGroup, device: torch.device, num_words: int = WORDS) -> torch.Tensor:
    """This rank's own memory of the boxes, which nobody else sees yet. RuntimeError (torch's) where there is none."""
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.empty(SETS, group.size, num_words, dtype=torch.int64, device=device).zero_()


def make_boxes(group: RankGroup, words: torch.Tensor) -> RankBoxes:
    """This rank's end, of its `empty_boxes`. Collective over the group, and no rank may send anything before all have
    agreed that theirs are made. RuntimeError (torch's) where the memory cannot be shared."""
    import torch.distributed._symmetric_memory as symmetric_memory

    assert group.handle is not None
    handle = symmetric_memory.rendezvous(words, group.handle.group_name)
    mapped = tuple(handle.get_buffer(rank, words.shape, words.dtype) for rank in range(group.size))
    addresses = torch.tensor([boxes.data_ptr() for boxes in mapped], device=words.device)
    clock = torch.zeros(2, dtype=torch.int32, device=words.device)
    return RankBoxes(group.rank, addresses, words, clock, mapped)
