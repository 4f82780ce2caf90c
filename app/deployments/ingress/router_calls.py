"""Calls an ingress makes to the Router: questions that come while one is under way travel together in the next.

A call between two processes costs many times what an answer does. One question alone goes at once; under load they
wait for each other, and the Router has one call at a time of each ingress, but for calls that are late.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from app.deployments.channel.own_context import start_outside
from app.deployments.channel.serve_port import answer_of
from app.deployments.router.admission import Answer
from app.deployments.router.question import Question
from app.records.block_hash import HASH_BYTES

# The Router takes a third of a microsecond for a hash, and has some 50 ms for all answers of one call.
MOST_QUESTIONS = 32
MOST_HASHES = 65536  # a question of more travels alone


@dataclass(slots=True, eq=False)
class Asked:
    """One question, and who waits for the answer."""

    question: Question
    answer: asyncio.Future[Answer | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RouterCalls:
    """The calls of one ingress; `handle` is Serve's, of `Router.route`. Lives on one event loop."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._waiting: list[Asked] = []  # for the call after the one under way
        self._sender: asyncio.Task[None] | None = None
        self._sent: list[Asked] = []  # in the call under way

    def ask(self, question: Question) -> Asked:
        """Ask, now or with the next call; whoever wants the answer no longer cancels it."""
        asked = Asked(question)
        self._waiting.append(asked)
        if self._sender is None:
            self._sender = start_outside(self._send())
        return asked

    def pass_over(self, asked: Asked) -> None:
        """The call with this question is late: others wait for it no longer."""
        if asked in self._sent:
            self._sent = []
            self._sender = start_outside(self._send()) if self._waiting else None

    async def _send(self) -> None:
        """Calls until nothing waits, unless others have passed this one over."""
        me = asyncio.current_task()
        while self._sender is me and (batch := self._take()):
            self._sent = batch
            await self._call(batch)
        if self._sender is me:
            self._sender, self._sent = None, []

    def _take(self) -> list[Asked]:
        """The questions of the next call: those that came first, as many as one call may carry."""
        waiting = [asked for asked in self._waiting if not asked.answer.done()]
        count = size = 0
        for asked in waiting[:MOST_QUESTIONS]:
            size += len(asked.question.block_hashes)
            if count and size > MOST_HASHES * HASH_BYTES:
                break
            count += 1
        self._waiting = waiting[count:]
        return waiting[:count]

    async def _call(self, batch: list[Asked]) -> None:
        """One call; if all of it fails, that is the answer to all in it. It ends once nobody waits for any answer."""
        call = asyncio.ensure_future(answer_of(self._handle, ([asked.question for asked in batch],), {}))
        left = len(batch)

        def count(answer: asyncio.Future[Answer | None]) -> None:
            nonlocal left
            left -= 1
            if not left:
                call.cancel()

        for asked in batch:
            asked.answer.add_done_callback(count)
        await asyncio.wait({call})
        if call.cancelled():
            return
        try:
            answers = list(zip(batch, call.result(), strict=True))
        except Exception as error:
            for asked in batch:
                if not asked.answer.done():
                    asked.answer.set_exception(error)
            return
        for asked, answer in answers:
            if not asked.answer.done():
                asked.answer.set_result(answer)
