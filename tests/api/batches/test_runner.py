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
from app.api.batches.run import Tools
from app.api.batches.runner import BatchRunner
from app.api.batches.turns import Turns
from app.api.in_process import Answer
from app.api.store import tenant_store
from app.api.store.entries import Lease
from app.api.store.kinds import Stores
from app.api.work_pool import WorkPool
from app.config import IngressConfig
from app.errors import OverloadedError
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
        self.asked: Counter[str] = Counter()
        self.body: Any = {"ok": True}
        self.num_bytes = 0
        tools = Tools(self.post, self.files, Turns(8), pool, 100, 1 << 22, 8, "me", lease_s)
        self.runner = BatchRunner(tools, self.stores("batches"), max_tenant)

    async def post(self, path: str, payload: bytes, tenant: str) -> Answer:
        self.asked[json.loads(payload)["n"]] += 1
        await asyncio.sleep(0)
        return Answer(200, self.body, "id", num_bytes=self.num_bytes)

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


def test_long_lines_are_written_beside_the_event_loop(pool: WorkPool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    dumps = json.dumps

    def noting(value: Any, **options: Any) -> str:
        text = dumps(value, **options)
        if len(text) > 1_000_000:
            threads.append(threading.current_thread())
        return text

    async def go() -> None:
        server = Server(pool, Nth(0, "done"))
        server.body, server.num_bytes = {"said": "x" * 1_500_000}, 1_500_000
        batch = await server.upload({"n": 0, "asked": "y" * 1_500_000})
        monkeypatch.setattr(batch_run.json, "dumps", noting)
        await server.runner.begin("t", batch)
        assert await server.results(await server.ended(batch)) == ["0"]

    limits.run(go())
    assert len(threads) == 2, "the request and its result"
    assert threading.main_thread() not in threads
