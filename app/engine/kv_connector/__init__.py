"""Tiers of KV blocks behind the device's prefix cache. A new one is a file here and a line in the table."""

from __future__ import annotations

from app.engine.kv_cache.kv_events import KVEventSink
from app.engine.kv_connector.base import KVConnector
from app.engine.worker_info import WorkerInfo
from app.registry import Registry

KV_CONNECTORS: Registry[type[KVConnector]] = Registry(
    "KV connector", {"host_memory": "app.engine.kv_connector.host_memory:HostMemory"}
)


def create_connector(info: WorkerInfo, sink: KVEventSink | None) -> KVConnector | None:
    """The tier that the workers have made room for; None when they have none."""
    if not info.num_host_blocks:
        return None
    return KV_CONNECTORS.load("host_memory")(info.num_host_blocks, info.block_bytes, sink)
