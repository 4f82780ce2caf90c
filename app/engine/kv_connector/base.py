"""The contract of a tier behind the device's prefix cache: what it holds, and which copies the next step message asks
for.

A connector is bookkeeping in the host half; the workers move the bytes. Its copies travel in the step messages (I2), so
the order of step messages is the order of contents: a block that is evicted while step message N is written is read
before anything of step message N or later can overwrite it, and what step message N stores, step message N may load.
Nothing here waits for a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from app.engine.kv_cache.kv_events import KVEventSink
from app.engine.step import KVTransfers


@dataclass(slots=True, frozen=True)
class ConnectorStats:
    """A connector at a moment; totals count from its start."""

    num_blocks: int
    num_cached_blocks: int
    block_bytes: int  # one block's size, over all workers
    query_tokens_total: int  # looked up by requests that got a row, after what the device held
    hit_tokens_total: int  # those of them that were loaded
    loaded_blocks_total: int
    stored_blocks_total: int

    @property
    def usage(self) -> float:
        """Share of the blocks that hold something, 0 to 1."""
        return self.num_cached_blocks / self.num_blocks


class KVConnector(ABC):
    """Finds, loads and takes in blocks by their hashes (I5). Used by the engine's thread; `stats` by any."""

    @abstractmethod
    def __init__(self, num_blocks: int, block_bytes: int = 0, sink: KVEventSink | None = None) -> None:
        """Room for `num_blocks` blocks, of which each has `block_bytes` over all workers; `sink` hears of changes."""

    @abstractmethod
    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of `hashes`, from the first on, can be loaded now."""

    @abstractmethod
    def hold(self, hashes: Sequence[bytes]) -> None:
        """Matched blocks stay until the next step message is written, whatever is evicted meanwhile."""

    @abstractmethod
    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """The next step message copies the held `hashes` into these device blocks."""

    @abstractmethod
    def evicted(self, hashes: list[bytes], blocks: list[int]) -> None:
        """These device blocks lose their contents with the next step message, which may store them first."""

    @abstractmethod
    def forget(self) -> None:
        """Nothing that it holds is found again. No copy waits for a step message."""

    @abstractmethod
    def looked_up(self, num_tokens: int, num_hit_tokens: int) -> None:
        """A request got a row that wanted so many tokens more than the device had, and loads so many of them."""

    @abstractmethod
    def take_transfers(self) -> KVTransfers | None:
        """The copies for the step message that is being written."""

    @abstractmethod
    def stats(self) -> ConnectorStats:
        """A snapshot; callable from any thread."""
