"""Queues requests with new grammars: these are compiled one at a time, and tenants take turns.

The ingress gives up a replica that does not answer, so nobody waits here for as long as that: who does not get a turn
in time is told so, and may come again. What has begun goes on, and its grammar is known by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from app.api.http.work_pool import WorkPool
from app.errors import OverloadedError

MAX_WAITING_GRAMMARS = 256  # that are to be compiled, a quarter of them of one tenant
MAX_WAIT_S = 10.0  # less than the ingress's patience with a call (SUBMIT_TIMEOUT_S)
RETRY_AFTER_S = 5.0


class GrammarQueue:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._work = WorkPool(1, MAX_WAITING_GRAMMARS, MAX_WAITING_GRAMMARS // 4)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return self._work.num_waiting

    async def run(self, tenant: str, call: Callable[[], None], undo: Callable[[], None], waited_s: float) -> None:
        """Run `call` in a thread when it is the tenant's turn; raises what it raises.

        `waited_s`: how long the same caller has waited before. OverloadedError when too many wait, or when the call has
        not ended in time; `undo` is called after it then, if it has begun.
        """
        future = self._work.submit(tenant, 0.0, call)
        try:
            await asyncio.wait_for(asyncio.wrap_future(future), max(0.0, MAX_WAIT_S - waited_s))
        except TimeoutError:
            if not future.cancelled():
                future.add_done_callback(lambda done: _undo(done, undo))
            raise OverloadedError(
                f"structured_outputs: new schemas and grammars are compiled one at a time; {self.num_waiting} others "
                f"wait, and this one was not ready within {MAX_WAIT_S:g} s; try later",
                retry_after_s=RETRY_AFTER_S,
            ) from None


def _undo(future: Future[None], undo: Callable[[], None]) -> None:
    if future.exception() is None:
        undo()
