"""Holds what all replicas of a model are to be, and what becomes of it.

Nothing keeps it but the processes that follow it: the Admin, which alone changes it, and every replica, which is told.
So it lives as long as one of them does, and a new application begins with its configuration.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from app.records.adapter import KnownAdapter
from app.records.engine_state import TAGS, Tag


@dataclass(frozen=True, slots=True)
class FleetState:
    """Told by the Admin; a later one has a greater epoch."""

    epoch: int = 0
    is_changing: bool = False  # a change is under way, which began from this: what is gone back to if it fails
    is_paused: bool = False
    sleep_level: int = 0
    asleep: frozenset[Tag] = frozenset()
    weights_missing: bool = False
    weights: str | None = None  # a directory; None: the configuration's
    revision: str = ""  # of the weights; empty: the configuration's
    adapters: tuple[KnownAdapter, ...] | None = None  # that all serve; None: the configuration's
    is_sent: bool = False  # the weights came from another process, and are nowhere to be had again

    def paused(self, is_paused: bool) -> FleetState:
        """All stand still, or go on."""
        return replace(self, is_paused=is_paused)

    def slept(self, level: int) -> FleetState:
        """All have gone to sleep, at this level at least."""
        return replace(self, sleep_level=max(self.sleep_level, level), asleep=frozenset(TAGS))

    def woken(self, tags: list[Tag] | None) -> FleetState:
        """Some or all (None) of what sleeps is awake; weights that were dropped are missing."""
        wanted = self.asleep if tags is None else self.asleep & set(tags)
        missing = self.weights_missing or ("weights" in wanted and self.sleep_level == 2)
        return replace(self, asleep=self.asleep - wanted, weights_missing=missing)._awake()

    def loaded(self, weights: str | None, revision: str, is_sent: bool = False) -> FleetState:
        """All have other weights."""
        return replace(self, weights=weights, revision=revision, is_sent=is_sent, weights_missing=False)._awake()

    def adapted(self, adapters: tuple[KnownAdapter, ...]) -> FleetState:
        """All serve these adapters."""
        return replace(self, adapters=adapters)

    def _awake(self) -> FleetState:
        return self if self.asleep or self.weights_missing else replace(self, sleep_level=0)

    def next(self, *, is_changing: bool = False) -> FleetState:
        """The same under the next epoch."""
        return replace(self, epoch=self.epoch + 1, is_changing=is_changing)

    def as_json(self) -> dict[str, Any]:
        """Returns what an operator reads."""
        return {
            "epoch": self.epoch,
            "is_changing": self.is_changing,
            "is_paused": self.is_paused,
            "sleep_level": self.sleep_level,
            "asleep": sorted(self.asleep),
            "weights_missing": self.weights_missing,
            "weights": "sent" if self.is_sent else self.weights,
            "adapters": None if self.adapters is None else [adapter._asdict() for adapter in self.adapters],
        }


@dataclass(frozen=True, slots=True)
class MemberReport:
    """Holds what one running replica says of itself."""

    replica_id: str
    index: int  # the `engine` label of its metrics
    state: FleetState | None  # what it was told last, or has joined with; None: it has not joined yet
    is_drained: bool = False
    error: str = ""  # why it could not be made what the fleet is


def latest(states: list[FleetState | None]) -> FleetState | None:
    """The one that was told last."""
    return max((state for state in states if state is not None), key=lambda state: state.epoch, default=None)


def sent_revision(state: FleetState, version: str, nonce: str) -> str:
    """The revision of weights that came from another process: never that of others."""
    return hashlib.blake2b(f"{state.revision}/{version}/{nonce}".encode(), digest_size=16).hexdigest()
