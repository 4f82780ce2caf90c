"""Holds what an operator has made of an engine: whether it schedules, sleeps, and with which weights
(app/engine/control)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")  # what sleeps and wakes by itself
HoldReason = Literal["pause", "sleep", "update"]
_HELD: dict[HoldReason, str] = {
    "pause": "an operator has paused the engine",
    "sleep": "the engine goes to sleep",
    "update": "the engine waits for new weights",
}


@dataclass(slots=True)
class EngineState:
    """Written between steps by the engine's thread, read by any."""

    holds: set[HoldReason] = field(default_factory=set)  # why new requests wait
    asleep: frozenset[Tag] = frozenset()  # what has no memory now
    sleep_level: int = 0  # 0: awake; 1: the weights are in host memory; 2: they are gone
    weights_missing: bool = False  # dropped, or half replaced: nothing may be computed

    is_updating: bool = False  # weights are on their way: requests wait for them

    @property
    def is_paused(self) -> bool:
        """True if new requests wait."""
        return bool(self.holds)

    @property
    def held(self) -> str:
        """Why new requests wait; empty where they do not."""
        return next((_HELD[reason] for reason in ("update", "sleep", "pause") if reason in self.holds), "")

    @property
    def refusal(self) -> str | None:
        """Why requests are refused; None: they are taken."""
        if self.asleep:
            return f"the engine is asleep (level {self.sleep_level}): wake_up brings it back"
        if self.weights_missing and not self.is_updating:
            return "the engine has no weights: reload_weights or update_weights brings them"
        return None
