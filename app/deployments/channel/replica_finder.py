"""Finds the running engine replicas of one model, again and again: for an ingress's channels and a Router's feeds.

Eager after the start and after a loss, when others are expected, and as long as nobody is found; else at leisure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from app.records.load_report import LoadReport

SEARCH_INTERVAL_S = 2.0
EAGER_INTERVAL_S = 0.25
EAGER_S = 30.0  # after the start and after a loss

logger = logging.getLogger("manta.channel")


@dataclass(slots=True, frozen=True)
class Discovery:
    """Names the replicas that answered when all running ones were asked."""

    present: frozenset[str]  # replica ids
    complete: bool  # all did: whoever is not present is retired
    reports: tuple[LoadReport, ...] = ()  # their answers


Discover = Callable[[], Awaitable[Discovery]]


class ReplicaFinder:
    """Hands each answer to `update`, on one event loop. `has_any` says whether a usable replica is known."""

    def __init__(
        self, model: str, discover: Discover, update: Callable[[Discovery], None], has_any: Callable[[], bool]
    ) -> None:
        self._model = model
        self._discover = discover
        self._update = update
        self._has_any = has_any
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._eager_until = time.monotonic() + EAGER_S

    @property
    def is_searching(self) -> bool:
        """True if the search runs, as it should from `start` to `close`."""
        return self._task is not None and not self._task.done()

    def start(self) -> None:
        """Look for replicas from now on."""
        self._task = asyncio.create_task(self._search())

    def search_soon(self) -> None:
        """Look soon whether a replica that is gone is back, or another one is there."""
        self._eager_until = time.monotonic() + EAGER_S
        self._wake.set()

    async def close(self) -> None:
        """Search no longer."""
        self._closed = True  # Serve may turn the cancellation of its own calls into an ordinary exception
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _search(self) -> None:
        while not self._closed:
            try:
                discovery = await self._discover()
                if not self._closed:
                    self._update(discovery)
            except Exception:  # the search must outlive any trouble of the control plane
                logger.exception("search for the replicas of %s failed", self._model)
            is_eager = time.monotonic() < self._eager_until or not self._has_any()
            try:
                await asyncio.wait_for(self._wake.wait(), EAGER_INTERVAL_S if is_eager else SEARCH_INTERVAL_S)
                await asyncio.sleep(EAGER_INTERVAL_S)
            except TimeoutError:
                pass
            self._wake.clear()
