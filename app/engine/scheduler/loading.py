"""Requests whose blocks are on their way back from another tier, while others compute.

Such a request has its row and blocks, but no tokens in a step before a worker has reported its loads as done: a step
waits for the loads of the rows in it, so it would hold up all the others. When nothing else is left to compute, it
goes on at once, and the step waits on the device. That makes this a matter of speed alone: the workers see to order.
"""

from __future__ import annotations

from app.engine.request import Request
from app.engine.scheduler.row_table import RowTable


class LoadingRequests:
    """Keeps them out of the steps by `rows.runnable`, and lets them in again."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._tickets: dict[int, Request] = {}  # in the order of their letters

    def add(self, request: Request, step_id: int) -> None:
        """The request has entered a row; letter `step_id` carries its loads."""
        request.load_step = step_id
        request.is_loading = True
        self._rows.runnable[request.row] = False
        self._tickets[int(self._rows.ticket[request.row])] = request

    def left(self, ticket: int, request: Request) -> None:
        """The request left the row in which it had this ticket."""
        request.is_loading = False
        self._tickets.pop(ticket, None)

    def returned(self, step_id: int, loading_since: int) -> None:
        """Letter `step_id` has returned; the loads of letters before `loading_since`, or of all (0), were done."""
        if not self._tickets:
            return
        done = min(step_id, loading_since - 1) if loading_since else step_id
        for ticket, request in list(self._tickets.items()):
            if request.load_step <= done:
                self._release(ticket, request)

    def release_all(self) -> bool:
        """Let the steps wait for the loads: nobody else needs them. False when there was nothing to release."""
        released = [request for request in self._tickets.values() if not request.paused]
        for ticket, request in list(self._tickets.items()):
            self._release(ticket, request)
        return bool(released)

    def _release(self, ticket: int, request: Request) -> None:
        del self._tickets[ticket]
        request.is_loading = False
        self._rows.runnable[request.row] = not request.paused
