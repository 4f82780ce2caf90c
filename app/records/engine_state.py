"""What an operator has made of an engine: whether it schedules, sleeps, and with which weights (app/engine/control)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache")  # what sleeps and wakes by itself
HoldReason = Literal["pause", "sleep", "update"]


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
        """Whether new requests wait."""
        return bool(self.holds)

    @property
    def refusal(self) -> str | None:
        """Why requests are refused; None: they are taken."""
        if self.asleep:
            return f"the engine is asleep (level {self.sleep_level}): wake_up brings it back"
        if self.weights_missing and not self.is_updating:
            return "the engine has no weights: reload_weights or update_weights brings them"
        return None
