"""Tiers of KV blocks behind the device's prefix cache: a new one is a file here and a line in app/backends.py."""

from __future__ import annotations

from app.backends import KV_CONNECTORS
from app.engine.kv_cache.kv_events import KVEventSink
from app.engine.kv_connector.base import KVConnector
from app.engine.worker_info import WorkerInfo


def create_connector(name: str, info: WorkerInfo, sink: KVEventSink | None) -> KVConnector | None:
    """The tier `name`, of the room that the workers have made for it; None when they have none."""
    if not info.num_host_blocks:
        return None
    connector: KVConnector = KV_CONNECTORS.load(name)(info.num_host_blocks, info.block_bytes, sink)
    return connector
