"""An ingress dies at any call of the store, before or after it was done; another one goes on with its batch."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, Literal

import pytest

from app.api.batches.batch import RUNNING, Batch, BatchBody
from app.api.batches.file_store import FileStore
from app.api.batches.line_room import LineRoom
from app.api.batches.run import MAX_TAKEOVERS, Tools
from app.api.batches.runner import BatchRunner
from app.api.batches.turns import Turns
from app.api.http.in_process import Answer
from app.api.http.work_pool import WorkPool
from app.api.store.entries import Lease
from app.api.store.kinds import Stores, store_limits
from app.api.store.local_store import LocalStore
from app.api.store.tenant_store import TenantStore
from app.config.ingress import IngressConfig
from tests import limits

CHAT = "/v1/chat/completions"
LEASE_S = 60.0
Fate = Literal["undone", "done"]
NUM_LINES = 4


class World:
    """What outlives an ingress: the stores, and their clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stores = {kind: LocalStore(most, lambda: self.now) for kind, most in store_limits(IngressConfig()).items()}
        self.asked: Counter[int] = Counter()
        self.is_slow = False


class Ingress:
    """The batches of one ingress, which dies at its call number `dies_at` of the store."""

    def __init__(self, world: World, pool: WorkPool, name: str, dies_at: int = 0, fate: Fate = "undone") -> None:
        self._world, self._dies_at, self._fate = world, dies_at, fate
        self.num_calls = 0
        self._others = asyncio.all_tasks()
        self.died = asyncio.Event()
        self.files = FileStore(self._stores("files"))
        tools = Tools(self._post, self.files, Turns(2), LineRoom(1 << 30), pool, 100, 1 << 22, 64, 2, name, LEASE_S)
        self.runner = BatchRunner(tools, self._stores("batches"), 4)

    @property
    def _stores(self) -> Stores:
        return lambda kind: TenantStore(lambda *called, **named: self._ask(kind, *called, **named))

    async def _ask(self, kind: str, method: str, *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(0)
        if self.died.is_set():
            await asyncio.Event().wait()
        self.num_calls += 1
        is_last = self.num_calls == self._dies_at
        if not is_last or self._fate == "done":
            answer = getattr(self._world.stores[kind], method)(*arguments, **named)
        if is_last:
            self.died.set()
            await asyncio.Event().wait()
        return answer

    async def _post(self, path: str, payload: bytes, tenant: str) -> Answer:
        number = json.loads(payload)["n"]
        if self._world.is_slow:
            await asyncio.Event().wait()
        self._world.asked[number] += 1
        await asyncio.sleep(0)
        return Answer(400 if number == 1 and path == CHAT else 200, b'{"n": %d}' % number, "id")

    async def run(self, batch: Batch) -> None:
        """Work until it has ended, or this has died; then nothing of it goes on."""
        ended = asyncio.create_task(self._ended(batch))
        died = asyncio.create_task(self.died.wait())
        await asyncio.wait((ended, died), return_when=asyncio.FIRST_COMPLETED)
        tasks = asyncio.all_tasks() - self._others
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ended(self, batch: Batch) -> None:
        limit = limits.Limit(30.0)
        while self.runner._entries:
            await asyncio.sleep(0)
            if not limit.left_s():
                limit.fail("the batch ends")


async def uploaded(world: World, endpoint: Any) -> Batch:
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": endpoint, "body": {"n": i}} for i in range(NUM_LINES)]
    files = FileStore(TenantStore(lambda *called, **named: _at_once(world, *called, **named)))
    file_id = await files.create("t", "in", "batch", "up", 60.0)
    await files.entries.append("t", file_id, [b"".join(json.dumps(line).encode() + b"\n" for line in lines)], "up")
    await files.finish("t", file_id)
    return Batch.new(BatchBody(input_file_id=file_id, endpoint=endpoint, completion_window="24h"))


async def _at_once(world: World, method: str, *arguments: Any, **named: Any) -> Any:
    return getattr(world.stores["files"], method)(*arguments, **named)


def checked(world: World, batch: Batch, most_files: int) -> Batch:
    """The batch as it is kept; its files are whole, and what is counted is there."""
    stored = world.stores["batches"].get("t", batch.id)
    assert stored is not None
    assert not stored.owner, "nobody goes on with it"
    done = Batch.load(stored.header)
    assert done.status not in RUNNING
    found: list[str] = []
    for name, count in (("output_file_id", "completed"), ("error_file_id", "failed")):
        file_id = done.shown[name]
        raw = b"".join(world.stores["files"].read("t", file_id, 0, 1 << 30) or []) if file_id else b""
        assert bool(raw) == bool(file_id)
        ids = [json.loads(line)["custom_id"] for line in raw.splitlines()]
        assert len(ids) == done.counts[count]
        if file_id:
            shown = world.stores["files"].get("t", file_id)
            assert shown is not None
            assert not shown.owner
            assert json.loads(shown.header)["bytes"] == len(raw)
        found += ids
    assert len(set(found)) == len(found), "no line is answered twice"
    assert len(world.stores["files"]) <= most_files
    if done.status != "cancelled":
        assert sorted(found) == [f"c{i}" for i in range(NUM_LINES)], "no line is lost"
    return done


@pytest.fixture
def pool() -> WorkPool:
    return WorkPool(2)


async def lives(pool: WorkPool, endpoint: str, how: str, dies_at: int, fate: Fate) -> int:
    """Two lives of one batch; the calls that the first ingress made."""
    world = World()
    batch = await uploaded(world, endpoint)
    first = Ingress(world, pool, "first", dies_at, fate)
    if how == "expired":
        batch.shown["expires_at"] = 0
    beginning = asyncio.create_task(first.runner.begin("t", batch))
    dying = asyncio.create_task(first.died.wait())
    await asyncio.wait((beginning, dying), return_when=asyncio.FIRST_COMPLETED)
    if how == "cancelled" and not first.died.is_set():
        world.is_slow = True
        cancelling = asyncio.create_task(first.runner.cancel("t", batch.id))
        await asyncio.wait((cancelling, dying), return_when=asyncio.FIRST_COMPLETED)
    await first.run(batch)
    world.now += 2 * LEASE_S
    world.is_slow = False
    if world.stores["batches"].get("t", batch.id) is None:
        assert (dies_at, fate) in ((1, "undone"), (2, "undone")), "nobody was told that there is a batch"
        return first.num_calls
    second = Ingress(world, pool, "second")
    while (found := await second.runner._batches.claim("second", LEASE_S)) is not None:
        second.runner._adopt(*found)
    await second.run(batch)
    done = checked(world, batch, 5 if first.died.is_set() else 3)
    assert done.status in ({"completed"} if how == "completed" else {how, "completed"}), done.shown["errors"]
    assert max(world.asked.values(), default=0) <= 2
    return first.num_calls


@pytest.mark.parametrize("how", ["completed", "cancelled", "expired"])
@pytest.mark.parametrize("endpoint", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("fate", ["undone", "done"])
def test_a_crash_at_any_call(pool: WorkPool, how: str, endpoint: str, fate: Fate) -> None:
    num_calls = limits.run(lives(pool, endpoint, how, 0, fate))
    assert num_calls > 8
    for dies_at in range(1, num_calls + 1):
        try:
            limits.run(lives(pool, endpoint, how, dies_at, fate))
        except AssertionError as error:
            raise AssertionError(f"the ingress died at call {dies_at} of {num_calls}") from error


@pytest.mark.parametrize("has_progress", [False, True])
def test_a_batch_that_ends_its_servers_fails_in_the_end(pool: WorkPool, has_progress: bool) -> None:
    """It would end one after the other, for ever. One that is answered meanwhile, line by line, goes on."""

    async def go() -> Batch:
        world = World()
        batch = await uploaded(world, "/v1/completions")
        world.stores["batches"].put("t", batch.id, batch.dump(), lease=Lease("zero", 0.0))
        for life in range(MAX_TAKEOVERS + 2):
            world.now += 2 * LEASE_S
            ingress = Ingress(world, pool, f"life {life}", 5 if life < MAX_TAKEOVERS + 1 else 0)
            while (found := await ingress.runner._batches.claim(f"life {life}", LEASE_S)) is not None:
                ingress.runner._adopt(*found)
            await ingress.run(batch)
            stored = world.stores["batches"].get("t", batch.id)
            if has_progress and stored is not None and stored.owner:
                kept = Batch.load(stored.header)
                kept.counts["completed"] = life + 1
                world.stores["batches"].put("t", batch.id, kept.dump(), lease=Lease(stored.owner, 0.0))
        stored = world.stores["batches"].get("t", batch.id)
        assert stored is not None
        assert not stored.owner
        return Batch.load(stored.header)

    ended = limits.run(go())
    if has_progress:
        assert ended.status == "completed"
    else:
        assert ended.status == "failed"
        assert "6 servers were lost" in ended.shown["errors"]["data"][0]["message"]
