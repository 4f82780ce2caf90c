"""The contract of a KV connector: it keeps blocks behind the device's prefix cache, or moves them elsewhere.

A connector is two halves under one name. This one, the host's, is bookkeeping: it knows blocks by their hashes and
says what the next step message asks for. The other is a feature in each worker (`KVConnector.worker`), which moves the
bytes; what it found out at its start comes back as its report. One that moves none is this half alone. Copies travel
in the step messages (I2), so the order of step messages is the order of contents: a block that is evicted while step
message N is written is read before anything of step message N or later can overwrite it, and what step message N
stores, step message N may load. Nothing here waits for a device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from app.records.kv_events import KVEventSink

BlockHook = Callable[[list[bytes], list[int]], None]  # hashes, and the device blocks that have them


class KVConnector(ABC):
    """Finds, loads and takes in blocks by their hashes (I5). Used by the engine's thread; `figures` by any."""

    # The half in the workers, as "module:attribute": makes a WorkerFeature from a FeatureContext (worker/features), or
    # gives None where this engine has no use for the connector; then it has no host half either. "": it needs none.
    worker: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def of(cls, reports: Sequence[Any], sink: KVEventSink | None) -> KVConnector:
        """The host half for what the workers' halves reported (`WorkerInfo.kv_connector`), by rank; `sink` hears of
        changes."""

    @property
    def hooks(self) -> tuple[BlockHook | None, BlockHook | None]:
        """`take_evicted`, and `take_computed` where it is overridden."""
        hears = type(self).take_computed is not KVConnector.take_computed
        return self.take_evicted, self.take_computed if hears else None

    @abstractmethod
    def match(self, hashes: Sequence[bytes]) -> int:
        """Counts how many of `hashes`, from the first on, can be loaded now."""

    @abstractmethod
    def hold(self, hashes: Sequence[bytes]) -> None:
        """Matched blocks stay until the next step message is written, whatever is evicted meanwhile."""

    @abstractmethod
    def load(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """The next step message copies the held `hashes` into these device blocks."""

    @abstractmethod
    def take_evicted(self, hashes: list[bytes], blocks: list[int]) -> None:
        """Note that device blocks lose their contents with the next step message, which may store them first."""

    def take_computed(self, hashes: list[bytes], blocks: list[int]) -> None:
        """Note that device blocks are full and can be found by their hashes from now on. Called as often as
        steps fill blocks, so only where a connector overrides it."""
        return

    @abstractmethod
    def forget(self) -> None:
        """Nothing that it holds is found again. No copy waits for a step message."""

    @abstractmethod
    def count_lookup(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Count a request that got a row: it wanted so many tokens more than the device had, and loads so many of
        them."""

    @abstractmethod
    def take_transfers(self) -> Any | None:
        """Something for the workers' halves, of the connector's own type and small to pickle, which goes with the step
        message that is being written; None: there is nothing to say."""

    def figures(self) -> dict[str, float]:
        """Returns what METRICS reads of it, by name (telemetry/figures.py); totals from its start. From any thread."""
        return {}
