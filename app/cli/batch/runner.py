"""Sends the requests of a batch, so many at a time, and writes each result as it comes.

A server that is full or starting is asked again, ever later. When it cannot be reached at all, the run ends without a
result for what was under way: the next run begins there. Any other answer is a result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from app.api.batches.lines import BadLine, BatchRequest
from app.api.http.in_process import Answer
from app.cli.batch.lines import Results
from app.cli.batch.transport import Transport, UnreachableError
from app.cli.command import CommandError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
TRY_LATER = frozenset({429, 502, 503, 504})


@dataclass(slots=True)
class Summary:
    """Counts how the lines of the input ended."""

    num_done: int = 0  # answered well, in this run
    num_failed: int = 0  # answered with an error, or no request at all, in this run
    num_skipped: int = 0  # had their result before
    num_failed_before: int = 0  # errors among them


class Runner:
    """One run. `retries` is how often a request is sent again before the run gives up."""

    def __init__(
        self,
        transport: Transport,
        results: Results,
        concurrency: int,
        retries: int,
        on_progress: Callable[[], object] = lambda: None,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self.summary = Summary()
        self._transport = transport
        self._results = results
        self._gate = asyncio.Semaphore(concurrency)
        self._retries = retries
        self._on_progress = on_progress
        self._first_wait_s = first_wait_s

    async def run(self, lines: Iterable[BatchRequest | BadLine]) -> Summary:
        """All lines without a result yet. CommandError when the server cannot be reached or knows no such key."""
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    if self._results.has(line):
                        self.summary.num_skipped += 1
                        self.summary.num_failed_before += self._results.failed(line)
                        self._on_progress()
                    elif isinstance(line, BadLine):
                        self._results.add_fault(line)
                        self.summary.num_failed += 1
                        self._on_progress()
                    else:
                        await self._gate.acquire()
                        group.create_task(self._one(line))
        except* Exception as group_error:
            raise _first(group_error) from None
        return self.summary

    async def _one(self, request: BatchRequest) -> None:
        try:
            answer = await self._ask(request)
            self._results.add_answer(request, answer.status, answer.request_id, answer.body)
        finally:
            self._gate.release()
        if answer.status < 400:
            self.summary.num_done += 1
        else:
            self.summary.num_failed += 1
        self._on_progress()

    async def _ask(self, request: BatchRequest) -> Answer:
        wait_s, reason, after_s = self._first_wait_s, "", None
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(LONGEST_WAIT_S, max(wait_s, after_s or 0.0)))
                wait_s *= 2
            try:
                answer = await self._transport.post(request.url, request.body)
            except UnreachableError as error:
                reason, after_s = str(error), None
            else:
                if answer.status == 401:
                    raise CommandError("HTTP 401: the server wants an API key, or another one; see --api-key")
                if answer.status not in TRY_LATER:
                    return answer
                reason, after_s = f"HTTP {answer.status}", answer.retry_after_s
        raise CommandError(
            f"no answer after {self._retries + 1} attempts ({reason}); what is done is kept: run it again"
        )


def _first(error: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception inside that is not a group."""
    inner = error.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
