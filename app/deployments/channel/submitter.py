"""Submits requests to one engine replica; those that share a prompt travel together, and their prompt once.

The choices of one body hold the same list of token ids, which a pickle writes once if they are all in it. So at most
one call a prompt is under way, and those that come meanwhile are the next one: with n choices two or three calls
instead of n. Requests to pooling models, which are short and many and bring no grammar that others would wait for, are
one queue: a call costs more than many of them do. Those that bring a picture or a sound are not short, whatever their
tokens say, and go alone. Pixels that the replica has stay here (sent_pixels.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal, Protocol

from app.deployments.channel.sent_pixels import SentPixels
from app.deployments.channel.wire import PixelsGoneError
from app.errors import EngineDeadError, MantaError
from app.records.adapter import AdapterAsk
from app.records.bundle import Bundle
from app.records.request import EngineRequest

MAX_CALL_TOKENS = (
    8192  # of the prompts of one call, unless it is one: longer calls would hold up the replica's event loop
)

Key = int | Literal["pooled"]


class SubmitPort(Protocol):
    """Hands requests to a replica."""

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        """Hand requests over, each with its stream id; returns the engine's refusal of each.

        Raises when the replica cannot be reached.
        """


@dataclass(slots=True, eq=False)
class _Submission:
    """One request, and who waits for the answer."""

    stream_id: str
    request: EngineRequest
    answer: asyncio.Future[MantaError | None]


class Submitter:
    """The submissions of one channel. `kept_bytes`: of pixels that the replica keeps."""

    def __init__(self, port: SubmitPort, channel_id: str, kept_bytes: int = 0) -> None:
        self._port = port
        self._sent = SentPixels(kept_bytes)
        self._channel_id = channel_id
        self._waiting: dict[Key, list[_Submission]] = {}  # for the call after the one under way
        self._calls: set[asyncio.Task[None]] = set()

    async def submit(self, stream_id: str, request: EngineRequest) -> MantaError | None:
        """The engine's refusal, or None. Raises what the call raised, and EngineDeadError after `close`."""
        answer: asyncio.Future[MantaError | None] = asyncio.get_running_loop().create_future()
        key = _key_of(request)
        if key not in self._waiting:
            self._waiting[key] = []
            call = asyncio.create_task(self._send(key))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        self._waiting[key].append(_Submission(stream_id, request, answer))
        return await answer

    def close(self, reason: str) -> None:
        """End all calls; those that wait get EngineDeadError."""
        for batch in self._waiting.values():
            self._fail(batch, EngineDeadError(reason))
        for call in self._calls:
            call.cancel()

    async def _send(self, key: Key) -> None:
        """Calls until nothing with this key waits; those that wait for the next call have its outcome, not this one's.

        The requests under way keep their list alive, and so `key` theirs.
        """
        batch: list[_Submission] = []
        try:
            while batch := self._next(key):
                await self._call(batch)
        except asyncio.CancelledError:
            self._fail([*batch, *self._waiting[key]], EngineDeadError("the call was ended"))
            raise
        finally:
            del self._waiting[key]

    async def _call(self, batch: list[_Submission]) -> None:
        """One call; if it fails, that is the answer to all that were in it."""
        try:
            refusals = await self._refusals(batch)
            for one, refusal in zip(batch, refusals, strict=True):
                if not one.answer.done():
                    one.answer.set_result(refusal)
        except Exception as error:
            self._fail(batch, error)

    async def _refusals(self, batch: list[_Submission]) -> list[MantaError | None]:
        """The replica's refusal of each; those whose pixels it has no more are sent whole, but for those whose client
        has left meanwhile: nobody would abort these there."""
        sent = [(one.stream_id, self._sent.without_known(one.request)) for one in batch]
        refusals = await self._port.submit(self._channel_id, sent)
        gone = [place for place, refusal in enumerate(refusals) if isinstance(refusal, PixelsGoneError)]
        if gone:
            self._sent.forget()
        whole = [place for place in gone if not batch[place].answer.done()]
        if whole:
            requests = [(batch[place].stream_id, batch[place].request) for place in whole]
            again = await self._port.submit(self._channel_id, requests)
            for place, refusal in zip(whole, again, strict=True):
                refusals[place] = refusal
        for one, refusal in zip(batch, refusals, strict=True):
            if refusal is None:
                self._sent.note(one.request)
        return refusals

    def _next(self, key: Key) -> list[_Submission]:
        """Take those that came while a call was under way, as many as a call takes; who has left is dropped."""
        waiting = [one for one in self._waiting[key] if not one.answer.done()]
        count, num_tokens = 0, 0
        for i, one in enumerate(waiting):
            prompt = one.request.prompt_token_ids
            num_tokens += 0 if i and prompt is waiting[i - 1].request.prompt_token_ids else len(prompt)
            if i and num_tokens > MAX_CALL_TOKENS:
                break
            count += 1
        self._waiting[key] = waiting[count:]
        return waiting[:count]

    def _fail(self, submissions: list[_Submission], error: Exception) -> None:
        for one in submissions:
            if not one.answer.done():
                one.answer.set_exception(error)


def _key_of(request: EngineRequest) -> Key:
    """Says with which others it travels. A call is bounded by tokens: what a request brings beside them goes alone."""
    is_short = request.pooling is not None and all(isinstance(ask, AdapterAsk | Bundle) for ask in request.asks)
    return "pooled" if is_short else id(request.prompt_token_ids)
