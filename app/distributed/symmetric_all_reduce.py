"""Sums of small messages inside one host, faster than NCCL: torch's one- and two-shot kernels over symmetric memory.

A decode step sums up a few hundred KB twice a layer; NCCL's launch and protocol then cost more than the bytes. Here
each rank copies its part into memory that all ranks of the host have mapped; with one shot every rank reads all parts
and adds them up, with two shots each rank adds up a slice and the others read it. Both add in the same order on every
rank, so all ranks get the same bits. Larger messages, and hosts where the memory cannot be mapped, stay with NCCL.
Multicast stays off. All that `auto` chooses was measured on NVLink.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar
from uuid import UUID

import torch

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.distributed.rank_boxes import empty_boxes, make_boxes
from app.platforms import platform_of

logger = logging.getLogger("manta.distributed")

Made = TypeVar("Made")
Limits = tuple[int, int]  # largest message for one shot, largest for two shots, in bytes

# Ranks -> limits, from `python -m benchmarks.all_reduce` on the machines we run on. A number of ranks that is missing
# has not been measured: `auto` leaves it to NCCL.
MEASURED: dict[int, Limits] = {2: (256 << 10, 16 << 20)}
ASKED_FOR: Limits = (256 << 10, 4 << 20)  # for small_all_reduce=symmetric_memory where nothing was measured
FUSED = frozenset({2})  # ranks of which the sum together with residual and norm was measured
FUSED_NOTE = "all-reduce: one kernel with the sum and norm behind it for few rows, symmetric memory, NCCL"
ALIGNMENT_BYTES = 16  # the kernels read vectors of this size


def shots(num_bytes: int, num_ranks: int, limits: Limits) -> int:
    """Returns how many shots a message takes: 1, 2, or 0 for NCCL."""
    if num_bytes == 0 or num_bytes % (ALIGNMENT_BYTES * num_ranks):
        return 0
    if num_bytes <= limits[0]:
        return 1
    return 2 if num_bytes <= limits[1] else 0


def empty_buffer(dtype: torch.dtype, device: torch.device, limits: Limits) -> torch.Tensor:
    """This rank's own memory, which nobody else sees yet. RuntimeError (torch's) where there is none."""
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.empty(max(limits) // dtype.itemsize, dtype=dtype, device=device)


class SymmetricAllReduce:
    """One group's buffer. Call it with a contiguous tensor on the device; the answer is the tensor, `lent` the buffer's
    part of its shape; or None."""

    def __init__(self, group: RankGroup, buffer: torch.Tensor, limits: Limits) -> None:
        """`buffer`: this rank's `empty_buffer`. Collective over the group. RuntimeError (torch's) where the memory
        cannot be shared."""
        import torch.distributed._symmetric_memory as symmetric_memory

        assert group.handle is not None
        self._group_name = group.handle.group_name
        self._num_ranks = group.size
        self._limits = limits
        self._buffer = buffer
        symmetric_memory.rendezvous(self._buffer, self._group_name)
        self._part = self._flat = self._buffer[:0]  # of the last message's shape: a step's messages are mostly alike

    def __call__(self, tensor: torch.Tensor, lent: bool = False) -> torch.Tensor | None:
        """Sum `tensor` over the ranks in place; None leaves it to NCCL. `lent`: see RankGroup.all_reduce."""
        count = shots(tensor.nbytes, self._num_ranks, self._limits)
        if count == 0 or tensor.dtype != self._buffer.dtype or not tensor.is_contiguous():
            return None
        if self._part.shape != tensor.shape:
            self._flat = self._buffer[: tensor.numel()]
            self._part = self._flat.view(tensor.shape)
        self._part.copy_(tensor)
        # The ranks meet again at the kernels' ends: after them nobody else reads or writes this rank's buffer.
        if count == 1:
            torch.ops.symm_mem.one_shot_all_reduce_out(self._flat, "sum", self._group_name, tensor.view(-1))
            return tensor
        torch.ops.symm_mem.two_shot_all_reduce_(self._flat, "sum", self._group_name)
        return self._part if lent else tensor.copy_(self._part)


def with_small_all_reduce(
    groups: ParallelGroups, choice: str, dtype: torch.dtype, device: torch.device, one_node: bool
) -> tuple[ParallelGroups, str]:
    """`groups` with a faster sum for the TP group where `choice` (`small_all_reduce`) and the hardware allow it, and a
    line that says which. Collective over the TP group, which may share a node (`one_node`) even if the worker group
    does not.
    """
    reason = _refusal(groups, choice, device, one_node)
    if reason is None and choice == "auto" and not _are_linked(groups.tp, device):
        reason = "no NVLink between the GPUs, without which nothing else was measured"
    if reason is None:
        tp, limits = groups.tp, MEASURED.get(groups.tp.size, ASKED_FOR)

        def own() -> tuple[torch.Tensor, torch.Tensor | None]:
            buffer = empty_buffer(dtype, device, limits)
            return buffer, empty_boxes(tp, device) if _is_fused(tp.size, choice, dtype) else None

        # In a rendezvous a rank waits for the others as long as they live. So nobody begins one alone.
        memory, reason = _of_all(tp, device, own)
        if memory is not None:
            buffer, words = memory
            made, reason = _of_all(
                tp,
                device,
                lambda: (SymmetricAllReduce(tp, buffer, limits), None if words is None else make_boxes(tp, words)),
            )
            if made is not None:
                note = "all-reduce: symmetric memory, NCCL" if made[1] is None else FUSED_NOTE
                return replace(groups, tp=replace(tp, small_all_reduce=made[0], boxes=made[1])), note
    return groups, f"all-reduce: {platform_of(device).collectives_label} ({reason})"


def _are_linked(group: RankGroup, device: torch.device) -> bool:
    """Asks every rank of the group about all of their devices. Collective."""
    platform = platform_of(device)
    own = torch.tensor([list(UUID(platform.uuid(device)).bytes)], dtype=torch.int32, device=device)
    uuids = {str(UUID(bytes=bytes(row))) for row in group.all_gather(own, dim=0).tolist()}
    return group.agree(platform.are_linked(uuids), device)


def _of_all(group: RankGroup, device: torch.device, make: Callable[[], Made]) -> tuple[Made | None, str]:
    """Calls `make` and returns what it made if every rank of the group made its own, else None and why. Collective."""
    made: Made | None = None
    reason = "another rank has no symmetric memory"
    try:
        made = make()
    except (RuntimeError, ImportError, AttributeError) as error:
        reason = f"symmetric memory is not to be had: {error}"
        logger.warning("%s", reason)
    return (made if group.agree(made is not None, device) else None), reason


def _is_fused(num_ranks: int, choice: str, dtype: torch.dtype) -> bool:
    return dtype.itemsize == 2 and (choice == "fused" or (choice == "auto" and num_ranks in FUSED))


def _refusal(groups: ParallelGroups, choice: str, device: torch.device, one_node: bool) -> str | None:
    platform = platform_of(device)
    if not platform.has_symmetric_memory:
        return platform.label
    if groups.tp.size == 1 or choice == "nccl":
        return "as configured"
    if not one_node:
        return "the ranks lie on several nodes"
    if choice == "auto" and groups.tp.size not in MEASURED:
        return f"nothing else was measured for {groups.tp.size} ranks"
    return None
