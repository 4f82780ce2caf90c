"""How long a test waits: the one place for its limits.

Seconds in tests are those of a calm machine of two cores. How much longer things take just now (`slowness`) is measured
by a fixed piece of work: the share of a core that it gets, and the core's speed. Load comes and goes in the midst of a
test, so what waits here looks again when its limit is near (`Limit`); what counts the clock itself - an HTTP client, an
option of the product - gets its limit from `patience_s` or `scaled_s` when it is made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

AT_ONCE_S = 0.2  # an option of the product, where what it waits for is known never to come

_PROBE_STEPS = 400_000
_PROBE_CALM_S = 0.03  # more than a scheduler's time slice, so the probe shares its core as others do
_KEPT_S = 5.0  # a measurement is good for so long
_MARGIN = 3.0  # for load that comes after a limit was handed away
_POLL_S = 0.01

_measured: tuple[float, float] | None = None  # (when, slowness)


def slowness(kept_s: float = _KEPT_S) -> float:
    """How many times longer work takes now than on a calm machine: 1 or more; measured at most `kept_s` ago."""
    global _measured
    if _measured is None or time.monotonic() - _measured[0] > kept_s:
        begin = time.perf_counter()
        total = 0
        for number in range(_PROBE_STEPS):
            total += number * number & 7
        _measured = (time.monotonic(), max(1.0, (time.perf_counter() - begin) / _PROBE_CALM_S))
    return _measured[1]


def patience_s(calm_s: float = 60.0) -> float:
    """A timeout, in seconds, for what is not meant to reach it: `timeout=` of a client, a subprocess, a join."""
    return calm_s * slowness() * _MARGIN


def scaled_s(calm_s: float) -> float:
    """An option of the product, in seconds, that a test sets small in order to see it pass."""
    return calm_s * slowness()


def pause(calm_s: float) -> None:
    """Let time pass in which what must not happen could; for what must happen there is `wait_until`."""
    time.sleep(scaled_s(calm_s))


async def async_pause(calm_s: float) -> None:
    """`pause` on an event loop."""
    await asyncio.sleep(scaled_s(calm_s))


class Limit:
    """A limit of `calm_s` seconds that moves as long as the machine is found slower than it was reckoned with.

    It ends only after a stretch that was measured at both its ends, so a load that has just gone counts too.
    """

    def __init__(self, calm_s: float) -> None:
        self.calm_s = calm_s
        self._begin = time.monotonic()
        self._slowness = slowness()
        self._end = self._begin + calm_s * self._slowness
        self._looked_again = False

    @property
    def passed_s(self) -> float:
        """Seconds by the clock since it began."""
        return time.monotonic() - self._begin

    def left_s(self) -> float:
        """Seconds by the clock until it is worth looking again; 0: it has ended."""
        left = self._end - time.monotonic()
        if left > 0:
            return left
        found = slowness(0.0)
        if self._looked_again and found < 1.25 * self._slowness:
            return 0.0
        self._looked_again, self._slowness = True, max(found, self._slowness)
        self._end = time.monotonic() + self.calm_s * self._slowness
        return self._end - time.monotonic()

    def fail(self, what: str) -> None:
        """End the test: `what` did not come."""
        raise AssertionError(f"after {self.passed_s:.1f} s ({self.calm_s:g} s on a calm machine) still not: {what}")


def wait_until(condition: Callable[[], Any], what: str = "the condition", calm_s: float = 30.0) -> Any:
    """The first true value of `condition`; AssertionError with `what` when none comes."""
    limit = Limit(calm_s)
    while not (value := condition()):
        if not limit.left_s():
            limit.fail(what)
        time.sleep(_POLL_S)
    return value


async def until(condition: Callable[[], Any], what: str = "the condition", calm_s: float = 30.0) -> Any:
    """`wait_until` on an event loop."""
    limit = Limit(calm_s)
    while not (value := condition()):
        if not limit.left_s():
            limit.fail(what)
        await asyncio.sleep(_POLL_S)
    return value


def run(main: Coroutine[Any, Any, T], calm_s: float = 60.0) -> T:
    """asyncio.run with an end."""

    async def limited() -> T:
        limit, task = Limit(calm_s), asyncio.ensure_future(main)
        while not task.done():
            if not (left := limit.left_s()):
                task.cancel()
                limit.fail("the coroutine's end")
            await asyncio.wait([task], timeout=left)
        return task.result()

    return asyncio.run(limited())


@contextmanager
def soon(calm_s: float, what: str = "the end of the block") -> Iterator[Limit]:
    """The block ends within `calm_s`, which is far more than it needs and far less than what else would end it."""
    limit = Limit(calm_s)
    yield limit
    if not limit.left_s():
        limit.fail(what)
