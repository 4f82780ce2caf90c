"""What tenants keep is the same for every ingress replica: two clients, one actor."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray

from app.api.openai.response_store import ResponseStore
from app.api.store.entries import Birth, Lease, StorageFullError, StoreConflictError
from app.config import IngressConfig, RequestLimits
from app.deployments.tenant_store import NAMESPACE, SharedStores
from tests import limits

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("ray_cluster")]
CONFIG = IngressConfig(max_stored_responses=3, max_stored_bytes=1000)


def two() -> list[Any]:
    return [SharedStores("app", CONFIG).stores()("responses") for _ in range(2)]


def test_what_one_keeps_the_other_finds() -> None:
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
        assert await one.delete("t", "d")
        assert not await other.delete("t", "d")
        with pytest.raises(StorageFullError) as full:
            await other.put("t", "e", b"x" * 1001)
        assert full.value.status == 413

    asyncio.run(go())


def test_a_response_whose_ingress_died_has_failed() -> None:
    async def go() -> None:
        one, other = (ResponseStore(store, RequestLimits()) for store in two())
        response = {"id": "r", "status": "in_progress", "previous_response_id": None, "error": None}
        await one.keep("t", response, b"[]", [b"event 0"], lease=Lease("one", 30.0))
        assert b"in_progress" in (await other.find("t", "r")).header
        with pytest.raises(StoreConflictError):
            await other.entries.append("t", "r", [b"2"], "two")
        await one.entries.renew("t", "r", "one", 0.0)  # the last that was heard of it
        stored = await other.find("t", "r")
        assert b'"status": "failed"' in stored.header
        chunks = await other.entries.read("t", "r", 2)
        assert b'"type": "response.failed", "sequence_number": 1' in chunks[0]
        with pytest.raises(StoreConflictError):
            await one.entries.append("t", "r", [b"too late"], "one")

    asyncio.run(go())


def test_a_lost_store_is_made_again() -> None:
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
