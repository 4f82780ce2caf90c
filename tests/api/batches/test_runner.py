"""The work on batches where the store is elsewhere: calls fail, done or not, and overtake each other."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from app.api.batches import run as batch_run
from app.api.batches.batch import RUNNING, Batch, BatchBody
from app.api.batches.file_store import FileStore
from app.api.batches.line_room import LineRoom
from app.api.batches.run import Tools
from app.api.batches.runner import BatchRunner
from app.api.batches.turns import Turns
from app.api.http.in_process import Answer
from app.api.http.work_pool import WorkPool
from app.api.store import tenant_store
from app.api.store.entries import Lease
from app.api.store.kinds import Stores
from app.config.ingress import IngressConfig
from app.errors import InvalidRequestError, OverloadedError
from tests import limits
from tests.api.store.shaky import Fates, Nth, shaky_stores

CHAT = "/v1/chat/completions"
CONFIG = IngressConfig()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_store, "FIRST_WAIT_S", 0.0)


@pytest.fixture
def pool() -> WorkPool:
    return WorkPool(2)


class Server:
    """The batches of one ingress, whose requests are answered at once."""

    def __init__(self, pool: WorkPool, fates: Fates, lease_s: float = 60.0, max_tenant: int = 4) -> None:
        self.stores: Stores = shaky_stores(CONFIG, fates)
        self.files = FileStore(self.stores("files"))
        self.room = LineRoom(1 << 30)
        self.asked: Counter[str] = Counter()
        self.raw = b'{"ok": true}'
        tools = Tools(self.post, self.files, Turns(8), self.room, pool, 100, 1 << 22, 64, 8, "me", lease_s)
        self.runner = BatchRunner(tools, self.stores("batches"), max_tenant)

    async def post(self, path: str, payload: bytes, tenant: str) -> Answer:
        self.asked[json.loads(payload)["n"]] += 1
        await asyncio.sleep(0)
        return Answer(200, self.raw, "id")

    async def upload(self, *bodies: dict[str, Any]) -> Batch:
        lines = [{"custom_id": str(i), "method": "POST", "url": CHAT, "body": body} for i, body in enumerate(bodies)]
        raw = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file_id = await self.files.create("t", "in", "batch", "up", 60.0)
        await self.files.entries.append("t", file_id, [raw], "up")
        await self.files.finish("t", file_id)
        return Batch.new(BatchBody(input_file_id=file_id, endpoint=CHAT, completion_window="24h"))

    async def ended(self, batch: Batch) -> Batch:
        limit = limits.Limit(30.0)
        while (found := (await self.runner.find("t", batch.id))[0]).status in RUNNING:
            if not limit.left_s():
                limit.fail(f"the batch is {found.status}")
            await limits.async_pause(0.001)
        return found

    async def results(self, batch: Batch) -> list[str]:
        lines = self.files.lines("t", batch.shown["output_file_id"], 1 << 22)
        return sorted([json.loads(line)["custom_id"] async for line in lines])


@pytest.mark.parametrize("fate", ["undone", "done"])
def test_any_call_of_the_store_may_fail_once(pool: WorkPool, fate: Any) -> None:
    """Each line is answered once and written once, whichever call it is."""

    async def go(n: int) -> int:
        is_begun = False
        nth = Nth(n, fate, lambda kind, method: "done" if is_begun and method != "claim" else "")
        server = Server(pool, nth)
        batch = await server.upload(*({"n": i} for i in range(3)))
        await server.runner.begin("t", batch)
        is_begun = True
        limit = limits.Limit(30.0)
        while server.runner._entries:  # `find` would be counted
            await asyncio.sleep(0)
            if not limit.left_s():
                limit.fail("the batch ends")
        is_begun = False
        done = await server.ended(batch)
        assert (done.status, done.counts) == ("completed", {"total": 3, "completed": 3, "failed": 0}), n
        assert await server.results(done) == ["0", "1", "2"], n
        assert set(server.asked.values()) == {1}, n
        return nth.num_calls

    num_calls = limits.run(go(0))
    assert num_calls > 10
    for n in range(1, num_calls + 1):
        limits.run(go(n))


def test_a_batch_waits_for_a_store_that_stays_away(pool: WorkPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not failed: what is done stays, and who claims it goes on."""
    monkeypatch.setattr(tenant_store, "PATIENCE_S", -1.0)

    async def go() -> None:
        server = Server(pool, Nth(2, "undone", lambda kind, method: "done" if method == "append" else ""), 0.2)
        batch = await server.upload({"n": 0}, {"n": 1}, {"n": 2})
        await server.runner.begin("t", batch)
        done = await server.ended(batch)
        assert (done.status, await server.results(done)) == ("completed", ["0", "1", "2"])
        assert sum(server.asked.values()) > 3, "it was taken over"

    limits.run(go())


def test_a_batch_that_breaks_shows_what_is_done(pool: WorkPool) -> None:
    async def go() -> None:
        server = Server(pool, Nth(0, "done"))
        answer = server.post

        async def post(path: str, payload: bytes, tenant: str) -> Answer:
            if json.loads(payload)["n"] == 1:
                await limits.async_pause(0.1)  # the other line is done
                raise RuntimeError("broken")
            return await answer(path, payload, tenant)

        tools = server.runner._tools
        server.runner = BatchRunner(replace(tools, post=post), server.stores("batches"), 4)
        batch = await server.upload({"n": 0}, {"n": 1})
        await server.runner.begin("t", batch)
        done = await server.ended(batch)
        assert (done.status, done.shown["errors"]["data"][0]["code"]) == ("failed", "server_error")
        assert await server.results(done) == ["0"]

    limits.run(go())


def test_the_watch_for_batches_outlives_surprises(pool: WorkPool) -> None:
    """A batch that another ingress has left is taken over, though the cluster could not be asked at first."""

    async def go() -> None:
        server = Server(pool, Nth(0, "done"), 0.05)
        batch = await server.upload({"n": 0})
        await server.stores("batches").put("t", batch.id, batch.dump(), lease=Lease("dead", 0.0))
        num_asked = 0

        async def has_store() -> bool:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                raise ConnectionError("the cluster restarts")
            return True

        server.runner.start(has_store)
        assert (await server.ended(batch)).status == "completed"

    limits.run(go())


def test_the_bound_of_a_tenant_holds_for_batches_begun_together(pool: WorkPool) -> None:
    async def go() -> None:
        server = Server(pool, Nth(0, "done"), max_tenant=2)
        batches = [await server.upload({"n": 0}) for _ in range(6)]
        begun = await asyncio.gather(*(server.runner.begin("t", one) for one in batches), return_exceptions=True)
        refused = [one for one in begun if isinstance(one, OverloadedError)]
        assert len(refused) == 4
        assert "at most 2" in refused[0].message

    limits.run(go())


def test_long_lines_are_worked_on_beside_the_event_loop(pool: WorkPool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def note(name: str) -> None:
        call = getattr(batch_run, name)

        def noting(*arguments: Any) -> Any:
            threads.append(threading.current_thread())
            return call(*arguments)

        monkeypatch.setattr(batch_run, name, noting)

    async def go() -> None:
        server = Server(pool, Nth(0, "done"))
        server.raw = b'{"said": "%b"}' % (b"x" * 1_500_000)
        batch = await server.upload({"n": 0, "asked": "y" * 1_500_000})
        await server.runner.begin("t", batch)
        assert await server.results(await server.ended(batch)) == ["0"]

    for name in ("parse_line", "_payload", "_line"):
        note(name)
    limits.run(go())
    assert len(threads) == 4, "the line as it is checked, as it is sent, the request and its result"
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("blank", [b"\n", b" \t\n"])
def test_empty_lines_are_work_too(pool: WorkPool, blank: bytes) -> None:
    """A file of nothing but line ends took a core for a second a megabyte."""

    async def go(num_blank: int) -> Batch:
        server = Server(pool, Nth(0, "done"))
        line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": {"n": 0}}).encode()
        file_id = await server.files.create("t", "in", "batch", "up", 60.0)
        await server.files.entries.append("t", file_id, [blank * num_blank + line], "up")
        await server.files.finish("t", file_id)
        batch = Batch.new(BatchBody(input_file_id=file_id, endpoint=CHAT, completion_window="24h"))
        await server.runner.begin("t", batch)
        return await server.ended(batch)

    assert limits.run(go(199)).status == "completed"
    failed = limits.run(go(200))
    assert failed.status == "failed"
    assert "more than 200 lines" in failed.shown["errors"]["data"][0]["message"]


def test_lines_of_many_blocks_keep_their_numbers(pool: WorkPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "BLOCK_LINES", 3)

    async def go() -> None:
        server = Server(pool, Nth(0, "done"))
        batch = await server.upload(*({"n": i} for i in range(10)))
        await server.runner.begin("t", batch)
        done = await server.ended(batch)
        assert await server.results(done) == [str(i) for i in range(10)]
        assert set(server.asked.values()) == {1}
        bad = await server.upload(*({"n": i, "stream": i == 7} for i in range(10)))
        await server.runner.begin("t", bad)
        assert [one["line"] for one in (await server.ended(bad)).shown["errors"]["data"]] == [8]

    limits.run(go())


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b'{"n":1.50, "\\u00e4": [1e3]}', b'{"n":1.50, "\\u00e4": [1e3]}'),
        (b'{\n"n": 1}', b'{"n":1}'),
        (b"a\nb", b'"a\\nb"'),
    ],
)
def test_an_answer_stands_in_its_line_as_it_came(raw: bytes, body: bytes) -> None:
    line = batch_run._line("c", Answer(200, raw, "r"), None)
    assert line.endswith(b'"response":{"status_code":200,"request_id":"r","body":%b},"error":null}\n' % body)
    assert line.count(b"\n") == 1
    assert batch_run._written(line) == ("c", False)


@pytest.mark.parametrize("where", [0, 1])
def test_a_line_is_bounded_wherever_it_stands_in_a_chunk(pool: WorkPool, where: int) -> None:
    async def go() -> None:
        server = Server(pool, Nth(0, "done"))
        file_id = await server.files.create("t", "in", "batch", "up", 60.0)
        long, chunks = b"x" * 11 + b"\n", [b"ab\nc", b"d\n\n", b"\n\n", b"e\n"]
        await server.files.entries.append("t", file_id, chunks, "up")
        assert [line async for line in server.files.lines("t", file_id, 10)] == [b"ab", b"cd", b"", b"", b"", b"e"]
        await server.files.entries.append("t", file_id, [long[:6], long[6:]] if where else [long], "up")
        with pytest.raises(InvalidRequestError, match="more than 10 bytes"):
            [line async for line in server.files.lines("t", file_id, 10)]

    limits.run(go())


def test_lines_in_memory_are_bounded_over_all_batches(pool: WorkPool) -> None:
    """Each batch would hold as many as may be under way, and a tenant has many batches."""

    async def go() -> None:
        server = Server(pool, Nth(0, "done"))
        most, largest = 6 << 20, 0
        server.room = LineRoom(most)
        answer = server.post

        async def post(path: str, payload: bytes, tenant: str) -> Answer:
            nonlocal largest
            largest = max(largest, server.room.total)
            return await answer(path, payload, tenant)

        tools = replace(server.runner._tools, post=post, room=server.room, max_line_bytes=1 << 20)
        server.runner = BatchRunner(tools, server.stores("batches"), 8)
        batches = [await server.upload(*({"n": i, "x": "y" * 500_000} for i in range(8))) for _ in range(6)]
        for batch in batches:
            await server.runner.begin("t", batch)
        assert [(await server.ended(batch)).status for batch in batches] == ["completed"] * 6
        assert 1_000_000 < largest <= 2 * most
        await limits.until(lambda: server.room.total == 0)
        tools = replace(tools, post=lambda path, payload, tenant: asyncio.Event().wait())  # type: ignore[arg-type]
        server.runner = BatchRunner(tools, server.stores("batches"), 8)
        cancelled = [await server.upload(*({"n": i, "x": "y" * 500_000} for i in range(8))) for _ in range(6)]
        for batch in cancelled:
            await server.runner.begin("t", batch)
        await limits.until(lambda: server.room.total > 1_000_000)
        for batch in cancelled:
            await server.runner.cancel("t", batch.id)
        assert [(await server.ended(batch)).status for batch in cancelled] == ["cancelled"] * 6
        await limits.until(lambda: server.room.total == 0, "what is cancelled holds nothing")

    limits.run(go())
