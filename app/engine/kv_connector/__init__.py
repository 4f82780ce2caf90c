"""KV connectors: tiers behind the device's prefix cache, and ways elsewhere. Another is a file and a line in
app/backends.py."""

from __future__ import annotations

from app.backends import KV_CONNECTORS
from app.engine.kv_connector.base import KVConnector
from app.records.kv_events import KVEventSink
from app.records.worker_info import WorkerInfo


def create_connector(name: str, info: WorkerInfo, sink: KVEventSink | None) -> KVConnector | None:
    """The host half of connector `name`; None where the workers have none of theirs."""
    if not info.kv_connector:
        return None
    connector: KVConnector = KV_CONNECTORS.load(name).of(info.kv_connector, sink)
    return connector
