"""How an ingress finds replicas and lets them go, over replicas in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.config.ingress import IngressConfig
from app.deployments.channel import replica_pool
from app.deployments.channel.channel_client import RequestMovedError, RequestStream
from app.deployments.channel.channel_hub import ChannelHub
from app.deployments.channel.replica_finder import Discovery
from app.deployments.channel.replica_pool import ReplicaPool
from app.deployments.channel.wire import decode_control
from app.deployments.routing.policies.base import RouteQuery
from app.errors import MantaError
from app.records.load_report import LoadReport
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests import limits
from tests.limits import run, until

QUERY = RouteQuery(10, 10)


class NoEngine:
    def abort(self, request_ids: list[str]) -> None: ...

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...


class Replica:
    """A port and the hub behind it."""

    def __init__(self, name: str) -> None:
        self.report = LoadReport("m", name, "1", True, 0, 0, 0, 64, 16, 0)
        self.hub = ChannelHub(NoEngine(), 8, 8.0)
        self.num_opened = 0
        self.told_draining = False
        self.opens = True

    async def open_channel(self, channel_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        self.num_opened += 1
        if not self.opens:
            await asyncio.Event().wait()
        channel = self.hub.open(channel_id, ingress_id)
        channel.send([], load=self.report)
        async for frame in channel.frames():
            yield frame

    async def submit(self, channel_id: str, requests: list[tuple[str, EngineRequest]]) -> list[MantaError | None]:
        for stream_id, one in requests:
            self.hub.add(channel_id, stream_id, one.request_id)
        return [None] * len(requests)

    async def seclude(self, channel_id: str, stream_id: str) -> bool:
        return self.hub.seclude(channel_id, stream_id)

    async def control(self, message: bytes) -> None:
        control = decode_control(message)
        self.told_draining |= control.draining
        self.hub.control(control)


class Cluster:
    """The replicas that Serve says are running, but for those that hang and so do not answer."""

    def __init__(self, *names: str, shutdown_s: float = 3600.0, **options: float) -> None:
        self.replicas = {name: Replica(name) for name in names}
        self.running = list(names)
        self.hanging: set[str] = set()
        self.num_searches = 0
        config = IngressConfig(**options)  # type: ignore[arg-type]
        self.pool = ReplicaPool("m", "ingress", config, self.discover, self.replicas.__getitem__, shutdown_s)

    async def discover(self) -> Discovery:
        self.num_searches += 1
        present = frozenset(self.running) - self.hanging
        return Discovery(present, complete=len(present) == len(self.running))

    async def start(self) -> None:
        self.pool.finder.start()
        await until(lambda: len(self.pool.live()) == len(self.replicas))


def request(name: str = "a") -> EngineRequest:
    return EngineRequest(name, [1, 2], SamplingParams(max_tokens=5, seed=0))


def test_finds_all_and_balances() -> None:
    async def main() -> None:
        cluster = Cluster("a", "b")
        await cluster.start()
        assert cluster.pool.kv_tokens == 64 * 16
        chosen = [cluster.pool.choose(QUERY, cluster.pool.live()) for _ in range(10)]
        assert sorted(chosen) == ["a"] * 5 + ["b"] * 5
        assert cluster.pool.choose(QUERY, ["b"]) == "b"
        await cluster.pool.close()
        assert cluster.pool.live() == {}

    run(main())


def test_broken_channel_is_opened_again() -> None:
    async def main() -> None:
        cluster = Cluster("a")
        await cluster.start()
        await cluster.pool.live()["a"].submit(request())
        next(iter(cluster.replicas["a"].hub.channels)).close()
        await until(lambda: not cluster.pool.live())
        await until(lambda: bool(cluster.pool.live()))
        assert cluster.replicas["a"].num_opened == 2
        assert cluster.pool.num_lost == 1
        await cluster.pool.close()

    run(main())


def test_retired_replica_is_drained() -> None:
    async def main() -> None:
        cluster = Cluster("a", "b")
        await cluster.start()
        stream = await cluster.pool.live()["a"].submit(request())
        cluster.running = ["b"]
        await until(lambda: list(cluster.pool.live()) == ["b"])
        await until(lambda: cluster.replicas["a"].told_draining)
        assert cluster.replicas["a"].hub.num_streams == 1  # what runs may finish
        stream.close()
        await until(lambda: not list(cluster.replicas["a"].hub.channels))
        assert cluster.replicas["a"].num_opened == 1
        await cluster.pool.close()

    run(main())


async def is_moved(stream: RequestStream) -> bool:
    """Whether the request ends here, to go on elsewhere; False while it runs."""
    outputs = asyncio.ensure_future(anext(stream.outputs()))  # type: ignore[arg-type]
    done, _ = await asyncio.wait([outputs], timeout=0)
    if not done:
        outputs.cancel()
        return False
    assert isinstance(outputs.exception(), RequestMovedError)
    return True


@pytest.mark.parametrize("move_after_s", [limits.AT_ONCE_S, 3000.0])
def test_what_still_runs_on_a_retired_replica_after_a_while_goes_on_elsewhere(move_after_s: float) -> None:
    async def main() -> None:
        cluster = Cluster("a", "b", move_after_s=move_after_s)
        await cluster.start()
        stream = await cluster.pool.live()["a"].submit(request())
        cluster.running = ["b"]
        await until(lambda: cluster.replicas["a"].told_draining)
        if move_after_s > limits.AT_ONCE_S:
            searches = cluster.num_searches
            await until(lambda: cluster.num_searches >= searches + 2)
            assert not await is_moved(stream), "what ends soon may end there"
        else:
            await until(lambda: not list(cluster.replicas["a"].hub.channels))
            assert await is_moved(stream)
        await cluster.pool.close()

    run(main())


@pytest.mark.parametrize("shutdown_s", [limits.AT_ONCE_S, 3000.0])
def test_with_no_other_replica_it_stays_until_just_before_serve_ends_that_one(shutdown_s: float) -> None:
    async def main() -> None:
        cluster = Cluster("a", shutdown_s=shutdown_s, move_after_s=0.0)
        await cluster.start()
        stream = await cluster.pool.live()["a"].submit(request())
        cluster.running = []
        await until(lambda: cluster.replicas["a"].told_draining)
        if shutdown_s > limits.AT_ONCE_S:
            searches = cluster.num_searches
            await until(lambda: cluster.num_searches >= searches + 2)
            assert not await is_moved(stream)
        else:
            await until(lambda: not list(cluster.replicas["a"].hub.channels))
            assert await is_moved(stream)
        await cluster.pool.close()

    run(main())


def test_no_answer_changes_nothing() -> None:
    async def main() -> None:
        cluster = Cluster("a")
        await cluster.start()
        cluster.hanging = {"a"}
        searches = cluster.num_searches
        await until(lambda: cluster.num_searches >= searches + 3)
        assert list(cluster.pool.live()) == ["a"]
        assert cluster.pool.finder.is_searching
        await cluster.pool.close()

    run(main())


def test_a_hanging_replica_hides_no_new_one_and_retires_nobody() -> None:
    async def main() -> None:
        cluster = Cluster("a", "b", "new")
        cluster.running, cluster.hanging = ["a", "b"], set()
        cluster.pool.finder.start()
        await until(lambda: len(cluster.pool.live()) == 2)
        cluster.running, cluster.hanging = ["a", "new"], {"a"}  # "b" is retired, "a" does not answer
        await until(lambda: set(cluster.pool.live()) == {"a", "b", "new"})
        assert not cluster.replicas["b"].told_draining
        cluster.hanging = set()  # now the answer is complete
        await until(lambda: set(cluster.pool.live()) == {"a", "new"})
        await until(lambda: cluster.replicas["b"].told_draining)
        await cluster.pool.close()

    run(main())


def test_a_channel_that_does_not_open_delays_nobody_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_pool, "OPEN_TIMEOUT_S", limits.scaled_s(1.5))

    async def main() -> None:
        cluster = Cluster("deaf", "late")
        cluster.running = ["deaf"]
        cluster.replicas["deaf"].opens = False
        cluster.pool.finder.start()
        await until(lambda: cluster.replicas["deaf"].num_opened == 1)
        cluster.running = ["deaf", "late"]
        await until(lambda: list(cluster.pool.live()) == ["late"])
        assert cluster.replicas["deaf"].num_opened == 1
        cluster.replicas["deaf"].opens = True
        await until(lambda: set(cluster.pool.live()) == {"deaf", "late"})
        assert cluster.replicas["deaf"].num_opened == 2
        assert cluster.pool.num_lost == 0
        await cluster.pool.close()

    run(main())
