"""Kept responses are the same for every ingress replica: two processes, one actor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from app.api.response_store import StoredResponse
from app.config import IngressConfig
from app.deployments.response_store import NAMESPACE, SharedResponseStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
CONFIG = IngressConfig(max_stored_responses=3)


class Replica:
    """Stands for one ingress replica: a process with a store of its own."""

    def __init__(self) -> None:
        self._store = SharedResponseStore("app", CONFIG)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call the store."""
        return asyncio.run(getattr(self._store, method)(*arguments))


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Any]]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    actor = ray.remote(num_cpus=0)(Replica)
    yield [actor.remote(), actor.remote()]
    ray.shutdown()


def ask(replica: Any, method: str, *arguments: Any) -> Any:
    return ray.get(replica.ask.remote(method, *arguments), timeout=60)


def test_what_one_keeps_the_other_finds(replicas: list[Any]) -> None:
    one, two = replicas
    ask(one, "put", "t", StoredResponse("a", b"1"))
    ask(two, "put", "t", StoredResponse("b", b"2", previous_id="a"))
    assert [record.data for record in ask(one, "chain", "t", "b")] == [b"1", b"2"]
    assert ask(two, "get", "other", "a") is None
    for name in ("c", "d"):
        ask(two, "put", "t", StoredResponse(name, b"3"))
    assert ask(one, "get", "t", "b") is None, "the limits are the application's"
    assert ask(one, "delete", "t", "d")
    assert not ask(two, "delete", "t", "d")


def test_a_lost_store_is_made_again(replicas: list[Any]) -> None:
    one, two = replicas
    ask(one, "put", "t", StoredResponse("kept", b"1"))
    ray.kill(ray.get_actor("responses-app", namespace=NAMESPACE), no_restart=True)
    assert ask(one, "get", "t", "kept") is None
    ask(one, "put", "t", StoredResponse("new", b"1"))
    assert ask(two, "get", "t", "new").data == b"1"
