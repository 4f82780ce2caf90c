"""The host-memory tier, with a count of the lookups that found something."""

from __future__ import annotations

from collections.abc import Sequence

from app.engine.kv_connector.host_memory import HostMemory


class CountingTier(HostMemory):
    """`hits` says how often."""

    hits = 0

    def match(self, hashes: Sequence[bytes]) -> int:
        """See KVConnector."""
        found = super().match(hashes)
        self.hits += found > 0
        return found
