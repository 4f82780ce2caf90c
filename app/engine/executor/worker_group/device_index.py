"""Finds which of the GPUs that a worker process sees is its own."""

from __future__ import annotations

import os
from collections.abc import Sequence

KEEPS_ALL_VISIBLE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def device_index(local_rank: int, assigned: Sequence[str | int] | None, visible: str | None, keeps_all: bool) -> int:
    """Index into the visible devices.

    `assigned`: Ray's GPU ids of this actor, None outside of Ray. `visible`: CUDA_VISIBLE_DEVICES. `keeps_all`: Ray
    left that as it was on the node, so that the ranks can map each other's memory; else Ray hides all other GPUs, and
    the own one is the first. Without an assigned GPU (a local process, a CPU), ranks count through the devices.
    """
    if not assigned:
        return local_rank
    if not keeps_all:
        return 0
    own = str(assigned[0])
    names = [name.strip() for name in visible.split(",")] if visible else []
    if own in names:
        return names.index(own)
    return int(own) if own.isdigit() else local_rank


def own_device_index(local_rank: int) -> int:
    """`device_index` of this process, asking Ray where Ray runs it."""
    import ray

    if not ray.is_initialized():
        return local_rank
    keeps_all = os.environ.get(KEEPS_ALL_VISIBLE, "") not in ("", "0")
    assigned = ray.get_gpu_ids()
    index = device_index(local_rank, assigned, os.environ.get("CUDA_VISIBLE_DEVICES"), keeps_all)
    if assigned and keeps_all:
        _tell_ray(index)
    return index


def _tell_ray(index: int) -> None:
    """Ray looks an actor's device up in CUDA_VISIBLE_DEVICES whenever a compiled graph reads or writes. Where all GPUs
    stay visible that need not be set; then the graph's loop would end, and the driver wait for it in vain."""
    import torch
    from ray.experimental.channel.common import ChannelContext

    ChannelContext.get_current().set_torch_device(torch.device("cuda", index))
