"""The one loop over an engine in this process, for everything that `LLM` does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from app.engine.core import EngineCore
from app.errors import EngineAsleepError
from app.records.outputs import EngineOutput
from app.records.request_state import Request


class EngineLoop:
    """Requests on their way through `core`; numbers them, and leaves the engine empty whatever happens."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._num_requests = 0
        self._open: set[str] = set()

    def new_id(self) -> str:
        """The id of one more prompt."""
        self._num_requests += 1
        return str(self._num_requests - 1)

    def send(self, requests: Iterable[Request]) -> None:
        """Hand more prepared requests to the engine, while `run` runs."""
        for request in requests:
            self._open.add(request.request_id)
            self.core.enqueue(request)

    def end(self, request_id: str) -> None:
        """Nobody wants more of a request: the engine ends it, and its further outputs go nowhere."""
        self._open.discard(request_id)
        self.core.abort_requests([request_id])

    def run(
        self, requests: Iterable[Request], take: Callable[[EngineOutput], None], *, in_pieces: bool = False
    ) -> None:
        """Give `take` every output until no request is left; it may send and end requests itself. `in_pieces`: the
        order of requests does not matter, so they are taken, and made, while the device computes those before them.

        EngineAsleepError where the engine is held (paused, in the midst of an update): nobody could let it go on.
        """
        left = iter(requests)
        try:
            self.send(self._wanted(left) if in_pieces else left)
            while self.core.has_work():
                for output in self.core.step():
                    self._deliver(output, take)
                self.send(self._wanted(left))
            if self._open:
                holds = ", ".join(sorted(self.core.state.holds))
                raise EngineAsleepError(f"the engine stands still ({holds}): resume it, or finish its update, first")
        finally:  # after an interrupt, or what `take` raised, the next call finds an empty engine
            self.core.abort_requests(list(self._open))
            self._open.clear()
            while self.core.has_work():
                self.core.step()

    def _wanted(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Those that the engine's next steps have room for."""
        while self.core.wants_more and (request := next(requests, None)) is not None:
            yield request

    def _deliver(self, output: EngineOutput, take: Callable[[EngineOutput], None]) -> None:
        if output.request_id not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        take(output)
