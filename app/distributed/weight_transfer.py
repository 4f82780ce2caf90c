"""Weights from another process, such as a trainer: it is rank 0 of a group of its own, every worker of every replica
is one more rank, and each tensor is one broadcast (NCCL between GPUs, gloo between CPUs).

The group has nothing to do with those of the workers' own steps, and knows no keys: the address is a trusted network's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from app.distributed.process_groups import interface_to
from app.errors import InvalidRequestError
from app.platforms import platform_of

TIMEOUT_S = 300.0  # for the others to come, and for one tensor


class WeightSender:
    """The sending side, for a trainer's script: made before the workers are told to connect, with one rank for each of
    them and one for itself. Not thread-safe."""

    def __init__(
        self, host: str, port: int, world_size: int, device: str = "cpu", timeout_s: float = TIMEOUT_S
    ) -> None:
        """Listen at `host`:`port` (0: any port; see `port`)."""
        self._world_size = world_size
        self._device = torch.device(device)
        self._timeout = timedelta(seconds=timeout_s)
        self._host = host
        self._store = TCPStore(host, port, world_size, is_master=True, timeout=self._timeout, wait_for_workers=False)
        self._group: Any = None

    @property
    def port(self) -> int:
        """The port where it listens."""
        return int(self._store.port)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Send tensors, in the order and with the types and shapes that the workers were told; waits for all workers to
        connect the first time."""
        if self._group is None:
            self._group = _group(self._store, self._host, 0, self._world_size, self._device, self._timeout)
        for tensor in tensors:
            _broadcast(self._group, tensor.detach().to(self._device).contiguous(), self._timeout)


class WeightReceiver:
    """One worker's side."""

    def __init__(
        self, host: str, port: int, rank: int, world_size: int, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Connect; InvalidRequestError where nobody listens, or not everybody comes in time."""
        if not 0 < rank < world_size:
            raise InvalidRequestError(
                f"world_size: {world_size} has no place for rank {rank}: one for each worker and one for the sender",
                param="world_size",
            )
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        try:
            store = TCPStore(host, port, world_size, is_master=False, timeout=self._timeout)
            self._group = _group(store, host, rank, world_size, device, self._timeout)
        except (RuntimeError, ValueError) as error:  # torch's DistError and the like
            raise InvalidRequestError(
                f"master_address: cannot join {host}:{port}: {error}", param="master_address"
            ) from error

    def receive(self, dtype: str, shape: list[int]) -> torch.Tensor:
        """The next tensor, of this type ("bfloat16") and shape. InvalidRequestError where it does not come."""
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise InvalidRequestError(f"dtype_names: {dtype!r} is no type of torch's", param="dtype_names")
        tensor = torch.empty(shape, dtype=kind, device=self._device)
        try:
            _broadcast(self._group, tensor, self._timeout)
        except RuntimeError as error:
            raise InvalidRequestError(f"the sender is gone, or sends something else: {error}") from error
        return tensor


def _group(store: Any, host: str, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> Any:
    """The handle of a group beside torch's own; gloo's waits until all ranks are there."""
    store = PrefixStore("weight_transfer", store)
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_to(host)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # else gloo asks for this host's name, which may lead nowhere
    return platform_of(device).process_group(store, rank, world_size, device, timeout)


def _broadcast(group: Any, tensor: torch.Tensor, timeout: timedelta) -> None:
    """From rank 0, as bytes: gloo does not know every type."""
    if not tensor.numel():
        return
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait(timeout)
