"""The contents of device memory kept in host memory while the device's is given back (sleep level 1).

Tensors stay what they are: their storage is emptied and later filled again, so whoever holds them, or a view of them,
sees the contents come back. Addresses may differ then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from app.platforms import platform_of

ALIGNMENT = 512  # of each storage in the copy
Storage = torch.UntypedStorage


def storages(tensors: Iterable[torch.Tensor]) -> list[Storage]:
    """The memory behind tensors, each once."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return list(found.values())


class HostCopy:
    """One copy of several storages, in one piece of host memory; page-locked where they are a GPU's."""

    def __init__(self, held: Sequence[Storage]) -> None:
        """Copy. MemoryError or RuntimeError where the host has no room; nothing is changed then."""
        self._held = list(held)
        self._sizes = [storage.nbytes() for storage in held]
        total = sum(_aligned(size) for size in self._sizes)
        self._memory = torch.empty(max(1, total), dtype=torch.uint8)
        platforms = (platform_of(storage.device) for storage in held)
        self._device = next((platform for platform in platforms if platform.is_async), None)  # None: all on the host
        self._is_pinned = self._device is not None
        if self._device is not None:
            self._device.pin(self._memory)
        for part, storage in zip(self._parts(), self._held, strict=True):
            part.copy_(_bytes(storage), non_blocking=self._is_pinned)
        self._synchronize()

    @property
    def num_bytes(self) -> int:
        """Counts the bytes that the storages hold."""
        return sum(self._sizes)

    def restore(self) -> None:
        """Memory for the storages again, and their contents. OutOfMemoryError where the device has no room."""
        for part, storage, size in zip(self._parts(), self._held, self._sizes, strict=True):
            storage.resize_(size)
            _bytes(storage).copy_(part, non_blocking=self._is_pinned)
        self._synchronize()

    def close(self) -> None:
        """Free the copy."""
        if self._device is not None and self._is_pinned:
            self._is_pinned = False
            self._device.unpin(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _parts(self) -> list[torch.Tensor]:
        ends, begin = [], 0
        for size in self._sizes:
            ends.append(self._memory[begin : begin + size])
            begin += _aligned(size)
        return ends

    def _synchronize(self) -> None:
        if self._device is not None:
            self._device.runtime.synchronize()


def empty(held: Iterable[Storage]) -> list[tuple[Storage, int]]:
    """Free the memory of storages; each with the size that it had."""
    sized = [(storage, storage.nbytes()) for storage in held]
    for storage, _ in sized:
        storage.resize_(0)
    return sized


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
