"""What the block pool tells the outside about its prefix cache: the feed of the router's block-hash index."""

from __future__ import annotations

from typing import Protocol


class KVEventSink(Protocol):
    """Receives every change of the set of cached block hashes, in order, on the engine's thread: must be quick."""

    def stored(self, parent: bytes, hashes: list[bytes]) -> None:
        """`hashes` are now cached; the first one's parent is `parent`, each further one's the one before it."""

    def removed(self, hashes: list[bytes]) -> None:
        """`hashes` were evicted."""

    def cleared(self) -> None:
        """Nothing is cached any more."""
