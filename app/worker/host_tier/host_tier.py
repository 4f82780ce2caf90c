"""The worker half of the connector `host_memory`, put together: its pool, the staging buffers, the streams."""

from __future__ import annotations

from dataclasses import replace

import torch

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.platforms import platform_of
from app.records.host_pool import HostPoolReport
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.records.worker_info import WorkerInfo
from app.worker.attention.kv_cache import KVCacheSpec
from app.worker.features.context import FeatureContext
from app.worker.host_tier.host_pool import HostPool
from app.worker.host_tier.kv_transfer import BackgroundTransfer, KVTransfer, Staging
from app.worker.host_tier.streams import DeviceStream
from app.worker.rows.worker_feature import WorkerFeature


class HostTier(WorkerFeature):
    """Made before the KV cache is sized, so that its buffers are counted; copies once the cache is there."""

    def __init__(self, memory_bytes: int, spec: KVCacheSpec, device: torch.device) -> None:
        """Raises ConfigError when the memory is too little or not to be had."""
        self._device = device
        self._pool = HostPool(memory_bytes, spec, device)
        self._block_bytes = spec.bytes_per_block
        self._staging: Staging | None = None
        self._transfer: KVTransfer | None = None
        if platform_of(device).is_async:
            self._staging = Staging(self._pool.blocks.shape[1], self._pool.num_blocks, spec.copy_dtype, device)

    def connect(self, kv_caches: list[torch.Tensor]) -> None:
        """From now on blocks are copied between these caches and the pool, wherever their memory lies."""
        if self._transfer is not None:  # the same tensors
            return
        if self._staging is None:
            self._transfer = KVTransfer(kv_caches, self._pool)
            return
        steps = DeviceStream(self._device, current=True)
        streams = steps, DeviceStream(self._device), DeviceStream(self._device)
        self._transfer = BackgroundTransfer(kv_caches, self._pool, self._staging, *streams)

    def report_start(self, info: WorkerInfo) -> WorkerInfo:
        """Host slots, and the bytes of a block on this rank."""
        report = HostPoolReport(self._pool.num_blocks, self._block_bytes)
        return replace(info, notes=[*info.notes, self._pool.describe()], kv_connector=(report,))

    def before(self, step: SchedulerOutput) -> None:
        """Enqueue the copies that come before the step."""
        assert self._transfer is not None, "a step before the KV cache"
        self._transfer.execute(step)

    def report(self, output: ModelRunnerOutput) -> None:
        """Report the loads that are still under way."""
        assert self._transfer is not None
        output.loading_since = self._transfer.loading_since()

    def close(self) -> None:
        """Free the pool, once nothing is under way any more."""
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None


def create(context: FeatureContext) -> HostTier | None:
    """The host tier, where one is configured."""
    memory_bytes, cache = context.config.kv_host_memory_bytes, context.forward.cache
    return HostTier(memory_bytes, cache.spec, context.state.device) if memory_bytes else None


def refuse_host_tier(config: EngineConfig) -> None:
    """ConfigError when one is asked for where there can be none."""
    if config.kv_host_memory_bytes:
        raise ConfigError(
            "kv_host_memory_bytes is for models that generate: a pooling model keeps its cache on the device",
            param="kv_host_memory_bytes",
        )
