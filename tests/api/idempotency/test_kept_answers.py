"""Answers in the store: of one run each, whole and once, whatever happens to those who write them."""

from __future__ import annotations

import asyncio
import os
import threading
import zlib
from typing import Any

import pytest

from app.api.http.held_bytes import SMALL_BYTES, HeldBytes
from app.api.idempotency import kept_answers
from app.api.idempotency.answer import RunningAnswer
from app.api.idempotency.kept_answers import PIECE_BYTES, AnswerStore
from app.api.idempotency.key import IdempotentRequest
from app.api.idempotency.middleware import Idempotency
from app.api.store import tenant_store
from app.api.store.kinds import local_stores
from app.api.store.tenant_store import TenantStore
from app.config.ingress import IngressConfig
from app.errors import EngineDeadError
from tests.api.store.shaky import Fate, shaky_stores
from tests.limits import run, scaled_s, until

REQUEST = IdempotentRequest("tenant", "key", "fingerprint")
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


def answers(store: TenantStore, lease_s: float = 8.0) -> AnswerStore:
    return AnswerStore(store, lease_s, kept_s=600.0, max_running=4)


def test_one_who_follows_is_not_given_the_bytes_of_another_run() -> None:
    async def scene() -> None:
        store = local_stores(IngressConfig())("answers")
        kept = await answers(store, lease_s=scaled_s(0.3)).begin(REQUEST, None)
        answer = RunningAnswer()
        await answer.add(START)
        await answer.add(part(b"The quick "))
        assert kept is not None
        await kept._write(answer)
        following = answers(store).replay(REQUEST)
        assert (await anext(following))["status"] == 200
        assert (await anext(following))["body"] == b"The quick "
        lost = await answers(store).find(REQUEST)
        while lost is not None and not lost.is_lost:  # its server is gone: the lease runs out
            await asyncio.sleep(0)
            lost = await answers(store).find(REQUEST)
        assert lost is not None
        second = await answers(store).begin(REQUEST, lost)
        assert second is not None
        await second._write(answer)
        with pytest.raises(EngineDeadError, match="send the request again"):
            await anext(following)
        again = answers(store).replay(REQUEST)
        assert [(await anext(again)).get("body") for _ in range(2)] == [None, b"The quick "]

    run(scene())


def test_an_answer_whose_last_piece_may_be_there_already_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_store, "PATIENCE_S", 0.0)
    out = False

    def fate(kind: str, method: str) -> Fate:
        return "done" if out and method == "append" else ""

    async def scene() -> None:
        nonlocal out
        store = shaky_stores(IngressConfig(), fate)("answers")
        kept = await answers(store).begin(REQUEST, None)
        answer = RunningAnswer()
        assert kept is not None
        writing = asyncio.create_task(kept.write_along(answer))
        out = True
        await answer.add(START)
        await answer.add(part(b"twice?"))
        await writing
        out = False
        await answer.add(part(b" no", more=False))
        await kept.finish(answer)
        assert await answers(store).find(REQUEST) is None, "so that the next one runs"

    run(scene())


def test_a_client_that_leaves_while_its_entry_is_made_leaves_a_run() -> None:
    async def scene() -> None:
        store, may_answer, asked, served = local_stores(IngressConfig())("answers"), asyncio.Event(), [], []

        async def ask(method: str, *arguments: Any, **named: Any) -> Any:
            result = await store._ask(method, *arguments, **named)
            if method == "put" and not asked:
                asked.append(method)
                await may_answer.wait()
            return result

        async def app(scope: Any, receive: Any, send: Any) -> None:
            served.append((await receive())["body"])
            await send(START)
            await send(part(b"an answer", more=False))

        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Any:
            if len(messages) == 1:
                await until(lambda: asked)
            return messages.pop()

        async def send(_: Any) -> None: ...

        headers = [(b"idempotency-key", b"key")]
        scope = {"type": "http", "method": "POST", "path": "/p", "query_string": b"", "headers": headers}
        middleware = Idempotency(app, ["/p"], TenantStore(ask), IngressConfig())
        await middleware({**scope, "state": {"tenant": "tenant"}}, receive, send)
        assert not served
        may_answer.set()
        await until(lambda: served == [b"{}"])
        await until(lambda: not middleware._running)
        stored = await store.get("tenant", "key")
        assert stored is not None
        assert not stored.owner

    run(scene())


def test_long_answers_are_packed_beside_the_event_loop_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    class Noting:
        def __getattr__(self, name: str) -> Any:
            threads.add(threading.current_thread())
            return getattr(zlib, name)

    async def scene() -> None:
        store = local_stores(IngressConfig())("answers")
        kept, answer = await answers(store).begin(REQUEST, None), RunningAnswer()
        assert kept is not None
        monkeypatch.setattr(kept_answers, "zlib", Noting())
        body = os.urandom(3 * PIECE_BYTES + 5)
        await answer.add(START)
        await answer.add(part(body[:-5]))
        await kept._write(answer)
        await answer.add(part(body[-5:], more=False))
        await kept.finish(answer)
        chunks = await store.read("tenant", "key", 0, 1 << 30)
        assert chunks is not None
        assert [len(zlib.decompress(chunk)) for chunk in chunks] == [PIECE_BYTES] * 3 + [5]
        messages = [message async for message in answers(store).replay(REQUEST)]
        assert b"".join(message.get("body", b"") for message in messages) == body

    run(scene())
    assert len(threads - {threading.main_thread()}) >= 1


def test_an_answer_that_finds_no_room_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        held = HeldBytes(200_000)
        holding = held.begin({}, "tenant")
        answer = RunningAnswer(has_room=holding.grow)
        await answer.add(START)
        following = answer.follow()
        await anext(following)
        await answer.add(part(b"x" * SMALL_BYTES))
        assert held.total == 0, "a small one always finds room"
        await answer.add(part(b"y" * 90_000))
        assert (held.total, answer.is_whole) == (90_000, True)
        await answer.add(part(b"z" * 90_000))
        assert (held.total, answer.is_whole) == (90_000, False)
        holding.release()
        assert held.total == 0

    run(scene())
