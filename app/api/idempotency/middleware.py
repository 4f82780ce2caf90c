"""Gives a request that is sent again under its `Idempotency-Key` the first one's answer.

The request that came first runs to its end, whatever becomes of its client; all that come with the key, itself too,
follow its answer from the first byte on: here while this replica makes it, else out of the store. What ends in an error
is not kept, so that the next one runs again. If the server is lost that made an answer, the next one runs too, and as
its seed follows from the key, it says the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.http.errors import error_response
from app.api.http.held_bytes import Holding, holding_of
from app.api.http.request_log import BROKEN
from app.api.idempotency.answer import RunningAnswer
from app.api.idempotency.kept_answers import REPLAYED, AnswerStore, KeptAnswer
from app.api.idempotency.key import RAW_HEADER, IdempotentRequest, KeyInUseError, fingerprint_of, key_of
from app.api.store.entries import Stored
from app.api.store.tenant_store import TenantStore
from app.config.ingress import IngressConfig
from app.errors import EngineDeadError, MantaError


class Idempotency:
    """POST requests of `paths` that have a key; all others pass."""

    def __init__(self, app: ASGIApp, paths: Collection[str], store: TenantStore, ingress: IngressConfig) -> None:
        self._app = app
        self._paths = frozenset(paths)
        most = ingress.max_tenant_running_keys
        self._answers = AnswerStore(store, ingress.lease_s, ingress.idempotency_s, most)
        self._running: dict[tuple[str, str], _Run] = {}
        self._begun: set[asyncio.Task[_Run | None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        is_asked = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths
        if not is_asked or RAW_HEADER not in dict(scope["headers"]):
            await self._app(scope, receive, send)
            return
        sent = False

        async def send_and_note(message: Message) -> None:
            nonlocal sent
            sent = True
            await send(message)

        try:
            key = key_of(scope)
            if (body := await _read(receive)) is not None:
                fingerprint = await asyncio.to_thread(fingerprint_of, scope, body.raw)
                request = IdempotentRequest(scope["state"]["tenant"], key, fingerprint)
                await _until_gone(receive, self._answer(request, scope, body), send_and_note)
        except MantaError as error:
            if sent:  # nothing but the end of the connection tells a client that its answer is not whole
                raise
            await error_response(error, scope)(scope, receive, send)

    async def _answer(self, request: IdempotentRequest, scope: Scope, body: _Body) -> AsyncIterator[Message]:
        """The messages of the answer, whoever makes it."""
        while True:
            run = self._running.get((request.tenant, request.key))
            if run is not None and run.answer.is_over and run.task is not None:
                await asyncio.wait((run.task,))  # until it is kept, or known not to be
            elif run is not None:
                request.check(run.request.fingerprint)
                if not run.answer.is_whole:
                    raise KeyInUseError
                async for message in run.answer.follow():
                    yield _replayed(message)
                return
            said_nothing = True
            async for message in self._answers.replay(request):
                said_nothing = False
                yield _replayed(message)
            if not said_nothing:
                return
            stored = await self._answers.find(request)
            if stored is not None and not stored.is_lost:
                continue  # somebody has begun meanwhile
            begun = asyncio.create_task(self._begin(request, stored, scope, body))
            self._begun.add(begun)  # or nobody would hold it when the client leaves
            begun.add_done_callback(self._begun.discard)
            _hold(begun, holding_of(scope))
            run = await asyncio.shield(begun)
            if run is not None:
                async for message in run.answer.follow():
                    yield message
                return

    async def _begin(self, request: IdempotentRequest, stored: Stored | None, scope: Scope, body: _Body) -> _Run | None:
        """From the entry to the run without a break, as an entry that nobody works on keeps others waiting."""
        kept = await self._answers.begin(request, stored)
        return None if kept is None else self._start(request, kept, scope, body)

    def _start(self, request: IdempotentRequest, kept: KeptAnswer, scope: Scope, body: _Body) -> _Run:
        run = _Run(request, kept, RunningAnswer(has_room=holding_of(scope).grow))
        place = request.tenant, request.key
        self._running[place] = run
        run.task = asyncio.create_task(self._run(run, scope, body))

        def end(_: object) -> None:
            if self._running.get(place) is run:
                del self._running[place]

        run.task.add_done_callback(end)
        return run

    async def _run(self, run: _Run, scope: Scope, body: _Body) -> None:
        """Make the answer and keep it. Its client is no part of this."""
        answer, state = run.answer, scope["state"] | {"seed": run.request.seed}
        writer = asyncio.create_task(run.kept.write_along(answer))
        try:
            await self._app({**scope, "state": state}, body.receive, answer.add)
            if not answer.has_ended:
                answer.fail(EngineDeadError("the answer was given up"))
        except Exception as error:
            answer.fail(error)
        await writer
        if answer.has_ended and answer.is_whole and 200 <= answer.status < 300 and not state.get(BROKEN):
            await run.kept.finish(answer)
        else:
            await run.kept.drop()


class _Run:
    """One request that runs here."""

    def __init__(self, request: IdempotentRequest, kept: KeptAnswer, answer: RunningAnswer) -> None:
        self.request = request
        self.kept = kept
        self.answer = answer
        self.task: asyncio.Task[None] | None = None


def _replayed(message: Message) -> Message:
    if message["type"] != "http.response.start":
        return message
    return {**message, "headers": [*message["headers"], REPLAYED]}


class _Body:
    """A body, which is let go as soon as the application has it; for that, the client never leaves."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._is_read = False

    async def receive(self) -> Message:
        """The body, once."""
        if self._is_read:
            await asyncio.Event().wait()
        raw, self.raw, self._is_read = self.raw, b"", True
        return {"type": "http.request", "body": raw, "more_body": False}


def _hold(begun: asyncio.Task[_Run | None], holding: Holding) -> None:
    """Counts what the request holds until its run has ended, wherever its client is by then."""

    def follow(_: object) -> None:
        run = None if begun.cancelled() or begun.exception() is not None else begun.result()
        if run is not None and run.task is not None:
            run.task.add_done_callback(holding.release)
        else:
            holding.release()

    holding.keep()
    begun.add_done_callback(follow)


async def _read(receive: Receive) -> _Body | None:
    """The whole body; None when the client has left before."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return _Body(b"".join(parts))


async def _until_gone(receive: Receive, messages: AsyncIterator[Message], send: Send) -> None:
    """Send the messages, as long as the client is there."""

    async def send_all() -> None:
        async for message in messages:
            await send(message)

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    sending, watching = asyncio.create_task(send_all()), asyncio.create_task(watch())
    try:
        await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            await sending
    finally:
        for task in (sending, watching):
            task.cancel()
        await asyncio.gather(sending, watching, return_exceptions=True)
        close = getattr(messages, "aclose", None)
        with contextlib.suppress(MantaError):
            if close is not None:
                await close()
