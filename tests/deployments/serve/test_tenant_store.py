"""What tenants keep is the same for every ingress replica: two clients, one actor."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest
import ray

from app.api.openai.response_store import ResponseStore
from app.api.store.entries import Birth, Lease, StorageFullError, StoreConflictError, StoreUnavailableError
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.deployments.serve.tenant_store import NAMESPACE, SharedStores, TenantStoreActor
from tests import limits

pytestmark = [pytest.mark.timeout(120)]
CONFIG = IngressConfig(max_stored_responses=3, max_stored_bytes=1000)


def two() -> list[Any]:
    return [SharedStores("app", CONFIG).stores()("responses") for _ in range(2)]


def test_what_one_keeps_the_other_finds(ray_cluster: str) -> None:
    async def go() -> None:
        one, other = two()
        await one.put("t", "a", b"1", append=[b"x"])
        await other.put("t", "b", b"2", born=Birth("a"))
        chain = await one.chain("t", "b", 10, 100)
        assert [(stored.header, first) for stored, first in chain] == [(b"1", b"x"), (b"2", b"")]
        assert await other.get("stranger", "a") is None
        for name in ("c", "d"):
            await other.put("t", name, b"3")
        assert await one.get("t", "b") is None, "the limits are the application's"
        assert await one.size() == (3, 4)
        assert await one.delete("t", "d")
        assert not await other.delete("t", "d")
        with pytest.raises(StorageFullError) as full:
            await other.put("t", "e", b"x" * 1001)
        assert full.value.status == 413

    asyncio.run(go())


def test_its_sizes_are_told_once_it_is_there(ray_cluster: str) -> None:
    async def go() -> None:
        shared = SharedStores("sizes", CONFIG)
        assert await shared.sizes() == {}, "asking how large it is makes no store"
        await shared.stores()("files").put("t", "a", b"12", append=[b"345"])
        sizes = await shared.sizes()
        assert sizes["files"] == (1, 5)
        assert sizes["answers"] == (0, 0)
        shared._is_out = True
        assert await shared.sizes() == {}

    asyncio.run(go())


def test_a_response_whose_ingress_died_has_failed(ray_cluster: str) -> None:
    async def go() -> None:
        one, other = (ResponseStore(store, RequestLimits()) for store in two())
        response = {"id": "resp_r", "status": "in_progress", "previous_response_id": None, "error": None}
        await one.keep("t", response, b"[]", [b"event 0"], lease=Lease("one", 30.0))
        assert b"in_progress" in (await other.find("t", "resp_r")).header
        with pytest.raises(StoreConflictError):
            await other.entries.append("t", "resp_r", [b"2"], "two")
        await one.entries.renew("t", "resp_r", "one", 0.0)  # the last that was heard of it
        stored = await other.find("t", "resp_r")
        assert b'"status": "failed"' in stored.header
        chunks = await other.entries.read("t", "resp_r", 2)
        assert b'"type": "response.failed", "sequence_number": 1' in chunks[0]
        with pytest.raises(StoreConflictError):
            await one.entries.append("t", "resp_r", [b"too late"], "one")

    asyncio.run(go())


def test_a_lost_store_is_made_again(ray_cluster: str) -> None:
    async def go() -> None:
        one, other = two()
        await one.put("t", "kept", b"1")
        ray.kill(ray.get_actor("tenant-store-app", namespace=NAMESPACE), no_restart=True)
        limit = limits.Limit(60.0)
        while await one.get("t", "kept") is not None:
            if not limit.left_s():
                limit.fail("the old store is gone")
        await one.put("t", "new", b"1")
        found = await other.get("t", "new")
        assert found is not None
        assert found.header == b"1"

    asyncio.run(go())


def test_clients_that_leave_do_not_stop_the_store(ray_cluster: str) -> None:
    """Ray's own proxy cancels the request's task with all that was called under its id."""

    @ray.remote(num_cpus=0)
    class Ingress:
        def __init__(self) -> None:
            self._store = SharedStores("left", CONFIG).stores()("responses")

        async def serve(self, number: int) -> int:
            return await self._store.put("t", str(number), b"")

    ingress, chance = Ingress.remote(), random.Random(1)
    for turn in range(150):
        assert ray.get(ingress.serve.remote(-1 - turn), timeout=limits.patience_s()) == 1
        asked = [ingress.serve.remote(turn) for _ in range(5)]
        limits.pause(chance.random() * 0.006)
        for one in asked:
            ray.cancel(one, recursive=True)


class Handle:
    """An actor of this process, as a handle of Ray's shows it, that may be silent."""

    def __init__(self) -> None:
        self.actor = TenantStoreActor(CONFIG)
        self.is_silent = False
        self.num_asked = self.num_found = 0

    def find(self) -> Any:
        self.num_found += 1
        return self

    @property
    def ask(self) -> Any:
        return _Method(self, self.actor.ask)

    @property
    def ping(self) -> Any:
        return _Method(self, self.actor.ping)


class _Method:
    def __init__(self, handle: Handle, method: Any) -> None:
        self._handle, self._method = handle, method

    async def remote(self, *arguments: Any) -> Any:
        self._handle.num_asked += 1
        if self._handle.is_silent:
            await asyncio.Event().wait()
        return await self._method(*arguments)


def test_an_outage_costs_those_that_meet_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        handle = Handle()
        shared = SharedStores("app", CONFIG, limits.scaled_s(0.3), handle.find)
        store = shared.stores()("responses")
        await store.put("t", "kept", b"1")
        handle.is_silent, found = True, handle.num_found
        with pytest.raises(StoreUnavailableError):
            await store.get("t", "kept")
        await limits.until(lambda: handle.num_found > found, "a look with a new handle")
        for _ in range(3):
            asked = handle.num_asked
            with pytest.raises(StoreUnavailableError) as told:
                await store.get("t", "kept")
            assert handle.num_asked == asked, "nobody waits for a store that is known not to answer"
        assert (told.value.status, told.value.code) == (503, "store_unavailable")
        handle.is_silent = False
        await limits.until(lambda: "answers again" in caplog.text)
        found_again = await store.get("t", "kept")
        assert found_again is not None

    with caplog.at_level(logging.WARNING, "manta.ingress"):
        limits.run(go())
    assert caplog.text.count("does not answer") == 1


def test_a_call_goes_on_when_its_client_leaves() -> None:
    async def go() -> None:
        handle = Handle()
        store = SharedStores("app", CONFIG, find=handle.find).stores()("responses")
        await store.get("t", "none")
        asking = asyncio.create_task(store.put("t", "late", b"1"))
        await limits.until(lambda: handle.num_asked == 2)
        asking.cancel()
        await asyncio.wait({asking})
        await limits.until(lambda: handle.actor._stores["responses"].get("t", "late") is not None)

    limits.run(go())
