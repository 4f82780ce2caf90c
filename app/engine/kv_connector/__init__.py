"""KV connectors: tiers behind the device's prefix cache, and ways elsewhere. Another is a file and a line in
app/backends.py."""

from __future__ import annotations

from app.backends import KV_CONNECTORS
from app.engine.kv_connector.base import KVConnector
from app.records.kv_events import KVEventSink
from app.records.worker_info import WorkerInfo


def create_connector(name: str, info: WorkerInfo, sink: KVEventSink | None) -> KVConnector | None:
    """The host half of connector `name`; None where the workers have none of theirs, which it needs."""
    kind: type[KVConnector] = KV_CONNECTORS.load(name)
    return None if kind.worker and not info.kv_connector else kind.of(info.kv_connector, sink)
