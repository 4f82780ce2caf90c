"""Keeps the rows to as many adapters as the workers have slots.

A request whose adapter finds no slot is passed by others, but not for ever: once as many as OVERTAKING for each slot
have taken a row with an adapter that had one, no further one does before its turn, so that a slot comes free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from app.engine.scheduler.step_plan import StepPlan
from app.records.adapter import AdapterAsk, AdapterState
from app.records.request_state import Request

OVERTAKING = 4
MOST_NAMES = 64  # of adapters that the metrics tell


class AdapterSlots:
    """Counts rows by their adapters. Requests without one pass through. `preempt`: see Slots. `state` may be read from
    any thread. `has`: whether the workers have an adapter to put there; for those that they lack, requests wait."""

    def __init__(self, num_slots: int, preempt: Callable[[Request, StepPlan], None]) -> None:
        self.state = AdapterState(num_slots=num_slots)
        self._preempt = preempt
        self.has: Callable[[bytes], bool] = lambda digest: True
        self.missing: dict[bytes, None] = {}  # of waiting requests, the first one's first
        self._num_slots = num_slots
        self._of_digest: dict[bytes, list[Request]] = {}  # those in rows
        self._waiting: Counter[str] = Counter()  # those without a row, by name
        self._is_waited_for = False  # in the step that is being planned
        self._num_overtaken = 0  # since a slot was last taken

    def begin_plan(self) -> None:
        """Waiting requests are looked at in order, from the first."""
        self._is_waited_for = False
        self.missing.clear()

    def make_room(self, request: Request, plan: StepPlan) -> bool:
        """True if a slot is there for a waiting request; requests that are held give theirs."""
        ask = request.spec.asked(AdapterAsk)
        if ask is not None and not self.has(ask.digest):
            self.missing[ask.digest] = None
            return False
        if self._may_enter(request):
            return True
        for held in self._held():
            self._preempt(held, plan)
        return self._may_enter(request)

    def _may_enter(self, request: Request) -> bool:
        """True if a waiting request may take a row, as far as its adapter goes."""
        ask = request.spec.asked(AdapterAsk)
        if ask is None:
            return True
        if ask.digest in self._of_digest:
            return not self._is_waited_for or self._num_overtaken < OVERTAKING * self._num_slots
        if len(self._of_digest) < self._num_slots:
            return True
        self._is_waited_for = True
        return False

    def _held(self) -> list[Request]:
        """The rows of an adapter whose clients hold all of them, where there is one: they keep nobody waiting."""
        found = (rows for rows in self._of_digest.values() if all(request.paused for request in rows))
        return list(next(found, ()))

    def add_waiting(self, request: Request) -> None:
        """Count a request that has no row, and wants one."""
        ask = request.spec.asked(AdapterAsk)
        if ask is not None:
            self._waiting[ask.name] += 1
            self._tell()

    def remove_waiting(self, request: Request) -> None:
        """Count a request that waits no longer."""
        ask = request.spec.asked(AdapterAsk)
        if ask is not None:
            self._waiting[ask.name] -= 1
            self._waiting += Counter()  # without those of which none waits
            self._tell()

    def enter(self, request: Request) -> None:
        """Count a request that takes a row."""
        ask = request.spec.asked(AdapterAsk)
        if ask is None:
            return
        if ask.digest not in self._of_digest:
            self._num_overtaken = 0
        elif self._is_waited_for:
            self._num_overtaken += 1
        self._of_digest.setdefault(ask.digest, []).append(request)
        self.remove_waiting(request)

    def leave(self, request: Request) -> None:
        """Count a request that leaves its row."""
        ask = request.spec.asked(AdapterAsk)
        if ask is None:
            return
        rows = self._of_digest[ask.digest]
        rows.remove(request)
        if not rows:
            del self._of_digest[ask.digest]
        self._tell()

    def _tell(self) -> None:
        names = Counter(_name(rows[0]) for rows in self._of_digest.values())
        self.state = AdapterState(
            num_slots=self._num_slots,
            running=tuple(digest.hex() for digest in self._of_digest),
            running_names=_first(names),
            waiting_names=_first(self._waiting),
        )


def _name(request: Request) -> str:
    ask = request.spec.asked(AdapterAsk)
    return "" if ask is None else ask.name


def _first(names: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(names)[:MOST_NAMES])
