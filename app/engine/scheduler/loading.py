"""Requests whose blocks are on their way back from another tier, while others compute.

Such a request has its row and blocks, but no tokens in a step before a worker has reported its loads as done: a step
waits for the loads of the rows in it, so it would hold up all the others. When nothing else is left to compute, it
goes on at once, and the step waits on the device. That makes this a matter of speed alone: the workers see to order.
"""

from __future__ import annotations

from app.engine.scheduler.row_table import RowTable
from app.records.request_state import Request


class LoadingRequests:
    """Keeps them out of the steps by `rows.runnable`, and lets them in again."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._by_generation: dict[int, Request] = {}  # in the order of their step messages

    def add(self, request: Request, step_id: int) -> None:
        """The request has entered a row; step message `step_id` carries its loads."""
        request.load_step = step_id
        request.is_loading = True
        self._rows.set_runnable(request.row, False)
        self._by_generation[int(self._rows.generation[request.row])] = request

    def leave(self, generation: int, request: Request) -> None:
        """Forget a request that leaves the row in which it had this generation."""
        request.is_loading = False
        self._by_generation.pop(generation, None)

    def release_done(self, step_id: int, loading_since: int) -> None:
        """Release those whose loads are done: step message `step_id` has returned, and with it the loads of step
        messages before `loading_since`, or of all (0)."""
        if not self._by_generation:
            return
        done = min(step_id, loading_since - 1) if loading_since else step_id
        for generation, request in list(self._by_generation.items()):
            if request.load_step <= done:
                self._release(generation, request)

    def release_all(self) -> bool:
        """Let the steps wait for the loads: nobody else needs them. False when there was nothing to release."""
        released = [request for request in self._by_generation.values() if not request.paused]
        for generation, request in list(self._by_generation.items()):
            self._release(generation, request)
        return bool(released)

    def _release(self, generation: int, request: Request) -> None:
        del self._by_generation[generation]
        request.is_loading = False
        self._rows.set_runnable(request.row, not request.paused)
