"""When requests end by themselves: a heap, looked at between steps when the earliest time has come."""

from __future__ import annotations

import heapq
import math

from app.records.request_state import Request

SPARE = 64  # ended requests that the heap may hold beside as many as live ones


class Deadlines:
    """Written by the engine's thread; `next_s` may be read by any."""

    def __init__(self) -> None:
        self.next_s = math.inf  # monotonic; nothing is late before
        self._heap: list[tuple[float, int, Request]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, num_live: int) -> None:
        """Watch a request, if it has a deadline. `num_live`: requests in the scheduler, for when to clear up."""
        deadline = request.spec.placement.deadline
        if deadline is None or (deadline.until_first_token and request.num_resumed_tokens):
            return
        if len(self._heap) > 2 * num_live + SPARE:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
        self._num_pushed += 1
        heapq.heappush(self._heap, (request.arrival + deadline.timeout_s, self._num_pushed, request))
        self.next_s = self._heap[0][0]

    def take_late(self, now: float) -> list[Request]:
        """Live requests whose deadline has passed, once each."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            deadline = request.spec.placement.deadline
            assert deadline is not None
            if not request.is_finished and not (deadline.until_first_token and request.first_token is not None):
                late.append(request)
        self.next_s = self._heap[0][0] if self._heap else math.inf
        return late


def missed(request: Request) -> str:
    """Says what a request is told whose deadline has passed."""
    deadline = request.spec.placement.deadline
    assert deadline is not None
    began = "did not end" if request.first_token is not None else "got no token"
    waited = "" if request.first_scheduled is not None else ", all of which it waited for its turn"
    return f"the request {began} within its deadline of {deadline.timeout_s:.3g} s{waited}"
