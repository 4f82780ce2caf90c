"""The host-memory tier's bytes on this rank: one tensor [H, E], a block of all layers in one piece.

H host slots, E elements of a block in all layers of this rank, one layer after the other. On a GPU the memory is
page-locked, once, so that copies run in the background at the link's speed.
"""

from __future__ import annotations

import os

import torch

from app.errors import ConfigError
from app.platforms import platform_of
from app.worker.attention.kv_cache import KVCacheSpec

GIB = 1 << 30


class HostPool:
    """Allocated at start, freed by `close`."""

    def __init__(self, memory_bytes: int, spec: KVCacheSpec, device: torch.device) -> None:
        """Allocate as many blocks as `memory_bytes` holds; ConfigError: not one, or more than the machine has."""
        self.num_blocks = memory_bytes // spec.bytes_per_block
        if not self.num_blocks:
            raise ConfigError(
                f"kv_host_memory_bytes={memory_bytes} holds no block, which takes {spec.bytes_per_block} bytes",
                param="kv_host_memory_bytes",
            )
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if memory_bytes > physical:  # it would seem to work, until a page is touched
            raise ConfigError(
                f"kv_host_memory_bytes={memory_bytes} is more than this machine has ({physical} bytes)",
                param="kv_host_memory_bytes",
            )
        elements = spec.bytes_per_block // spec.copy_dtype.itemsize
        self.layers = spec.copy_slices()  # where each layer's part of a block lies in E
        self._platform, self._is_pinned = platform_of(device), False
        try:
            self.blocks = torch.empty(self.num_blocks, elements, dtype=spec.copy_dtype)
            if self._platform.is_async:
                self._platform.pin(self.blocks)
                self._is_pinned = True
        except RuntimeError as error:
            raise ConfigError(
                f"kv_host_memory_bytes={memory_bytes}: {memory_bytes / GIB:.1f} GiB are not to be had: {error}",
                param="kv_host_memory_bytes",
            ) from error

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return self.blocks.numel() * self.blocks.itemsize

    def describe(self) -> str:
        """A line for the start-up notes."""
        pinned = "pinned " if self._is_pinned else ""
        return f"host KV tier: {self.num_blocks} blocks ({self.num_bytes / GIB:.2f} GiB of {pinned}host memory)"

    def close(self) -> None:
        """Unlock the memory; no copy may be under way."""
        if self._is_pinned:
            self._is_pinned = False
            self._platform.unpin(self.blocks)
