"""The host-memory tier of one worker, put together: its pool, the staging buffers, the lanes."""

from __future__ import annotations

import torch

from app.config import EngineConfig
from app.engine.attention.kv_cache import KVCacheSpec
from app.engine.worker.host_tier.host_pool import HostPool
from app.engine.worker.host_tier.kv_transfer import BackgroundTransfer, KVTransfer, Staging
from app.engine.worker.host_tier.lanes import CudaLane
from app.errors import ConfigError


class HostTier:
    """Made before the KV cache is sized, connected to it afterwards; does nothing where none is configured."""

    def __init__(self, config: EngineConfig, spec: KVCacheSpec, device: torch.device) -> None:
        """Raises ConfigError when the memory is too little or not to be had."""
        self._device = device
        self._pool: HostPool | None = None
        self._staging: Staging | None = None
        if not config.kv_host_memory_bytes:
            return
        self._pool = HostPool(config.kv_host_memory_bytes, spec, device)
        if device.type == "cuda":
            elements = self._pool.blocks.shape[2]
            self._staging = Staging(spec.num_layers, elements, self._pool.num_blocks, spec.copy_dtype, device)
        self._block_bytes = spec.bytes_per_block

    @property
    def num_blocks(self) -> int:
        """Host slots."""
        return self._pool.num_blocks if self._pool is not None else 0

    @property
    def block_bytes(self) -> int:
        """Of one block on this rank; 0 where there is no tier."""
        return self._block_bytes if self._pool is not None else 0

    @property
    def notes(self) -> list[str]:
        """For the start-up notes."""
        return [self._pool.describe()] if self._pool is not None else []

    def connect(self, caches: list[torch.Tensor]) -> KVTransfer | None:
        """The copies between these caches and the pool."""
        if self._pool is None:
            return None
        if self._staging is None:
            return KVTransfer(caches, self._pool)
        steps = CudaLane(self._device, current=True)
        return BackgroundTransfer(
            caches, self._pool, self._staging, steps, CudaLane(self._device), CudaLane(self._device)
        )


def refuse_host_tier(config: EngineConfig) -> None:
    """ConfigError when one is asked for where there can be none."""
    if config.kv_host_memory_bytes:
        raise ConfigError(
            "kv_host_memory_bytes is for models that generate: a pooling model keeps its cache on the device",
            param="kv_host_memory_bytes",
        )
