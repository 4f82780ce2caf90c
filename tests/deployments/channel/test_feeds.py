"""Feeds from engine replicas to Routers, in memory: snapshots, lost batches, deaths, several Routers, leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from app.deployments.channel.feed_hub import FeedHub
from app.deployments.channel.feed_pool import FeedPool
from app.deployments.channel.replica_finder import Discovery
from app.deployments.routing.load_book import LoadBook
from app.deployments.routing.policies import create_policy
from app.deployments.routing.policies.base import RouteQuery
from app.deployments.routing.prefix_index import PrefixIndex
from app.records.kv_events import KVEventLog
from app.records.load_report import LoadReport
from tests.limits import run, until

BLOCK_SIZE = 16


def hashes(*ids: int) -> tuple[bytes, ...]:
    return tuple(i.to_bytes(16, "little") for i in ids)


class Replica:
    """An engine's log and hub; `swallow` loses the next frames on their way, `cut` ends all streams."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = KVEventLog(name, "1")
        self.hub = FeedHub(self.log)
        self.outstanding = 0
        self.swallow = 0
        self.num_opened = 0
        self.present = True
        self._cut = asyncio.Event()

    def report(self) -> LoadReport:
        return LoadReport("m", self.name, "1", True, 0, 0, self.outstanding, 64, BLOCK_SIZE, 0)

    def store(self, *ids: int) -> None:
        self.log.report_stored(b"", list(hashes(*ids)))
        self.hub.publish(self.report(), force=False)

    def die(self) -> None:
        self.present = False
        self._cut.set()

    async def open_feed(self, router_id: str) -> AsyncGenerator[bytes, None]:
        self.num_opened += 1
        feed = self.hub.open(router_id, self.report())
        cut = asyncio.create_task(self._cut.wait())
        frames = feed.frames()
        try:
            while True:
                next_frame = asyncio.ensure_future(anext(frames, None))  # type: ignore[arg-type]
                await asyncio.wait({next_frame, cut}, return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    next_frame.cancel()
                    raise ConnectionError("the replica is gone")
                frame = next_frame.result()
                if frame is None:
                    return
                if self.swallow:
                    self.swallow -= 1
                else:
                    yield frame
        finally:
            cut.cancel()
            self.hub.drop(feed)


class Cluster:
    def __init__(self, names: str, num_routers: int = 1) -> None:
        self.replicas = {name: Replica(name) for name in names}
        self.pools = [self.router(f"router{i}") for i in range(num_routers)]

    def router(self, router_id: str) -> FeedPool:
        book = LoadBook(create_policy("prefix_aware"), index=PrefixIndex())
        return FeedPool("m", router_id, book, self._discover, self.replicas.__getitem__)

    async def _discover(self) -> Discovery:
        present = [replica for replica in self.replicas.values() if replica.present]
        reports = tuple(replica.report() for replica in present)
        return Discovery(frozenset(report.replica_id for report in reports), complete=True, reports=reports)


def found(pool: FeedPool, *ids: int) -> dict[str, int]:
    assert pool.book.index is not None
    matches = pool.book.index.match(hashes(*ids), 1e9)  # so late that nothing is speculative
    return {name: match.device_blocks for name, match in matches.items()}


def play(scene: Callable[[Cluster], Coroutine[Any, Any, None]], names: str, num_routers: int = 1) -> None:
    async def main() -> None:
        cluster = Cluster(names, num_routers)
        for pool in cluster.pools:
            pool.finder.start()
        try:
            await scene(cluster)
        finally:
            for pool in cluster.pools:
                await pool.close()

    run(main())


def test_every_router_knows_what_was_there_before_it_and_what_comes() -> None:
    async def scene(cluster: Cluster) -> None:
        cluster.replicas["a"].store(1, 2)  # before anybody listens
        await until(lambda: all(pool.num_feeds == 2 for pool in cluster.pools), "both replicas are heard")
        await until(lambda: all(found(pool, 1, 2, 3) == {"a": 2} for pool in cluster.pools), "the snapshot")
        cluster.replicas["a"].store(3)
        cluster.replicas["b"].store(1)
        await until(lambda: all(found(pool, 1, 2, 3) == {"a": 3, "b": 1} for pool in cluster.pools), "the batches")
        late = cluster.router("router-late")
        cluster.pools.append(late)
        late.finder.start()
        await until(lambda: found(late, 1, 2, 3) == {"a": 3, "b": 1}, "a new Router rebuilds the index")

    play(scene, "ab", num_routers=2)


def test_a_lost_batch_brings_a_snapshot() -> None:
    async def scene(cluster: Cluster) -> None:
        (pool,), replica = cluster.pools, cluster.replicas["a"]
        await until(lambda: pool.num_feeds == 1 and replica.hub.num_feeds == 1, "the feed is open")
        replica.store(1)
        await until(lambda: found(pool, 1) == {"a": 1}, "the first batch")
        replica.swallow = 1
        replica.store(2)
        await until(lambda: replica.swallow == 0, "the batch is lost")
        replica.store(3)
        await until(lambda: found(pool, 1, 2, 3) == {"a": 3}, "all of it")
        assert pool.num_gaps == 1
        assert replica.num_opened == 2

    play(scene, "a")


def test_a_dead_replica_leaves_nothing_behind() -> None:
    async def scene(cluster: Cluster) -> None:
        (pool,) = cluster.pools
        for replica in cluster.replicas.values():
            replica.store(1, 2)
        await until(lambda: found(pool, 1, 2) == {"a": 2, "b": 2}, "both are known")
        cluster.replicas["a"].die()
        await until(lambda: found(pool, 1, 2) == {"b": 2}, "a is forgotten")
        assert [load.report.replica_id for load in pool.book.replicas()] == ["b"]
        query = RouteQuery(40, 10, hashes(1, 2))
        decisions = [pool.book.route(query) for _ in range(5)]
        assert {(d.replica_id, d.level) for d in decisions if d is not None} == {("b", "exact")}

    play(scene, "ab")


def test_a_retired_replica_is_let_go() -> None:
    """Serve waits for the feed to end before it stops the replica."""

    async def scene(cluster: Cluster) -> None:
        (pool,), replica = cluster.pools, cluster.replicas["a"]
        await until(lambda: replica.hub.num_feeds == 1, "the feed is open")
        replica.present = False
        await until(lambda: replica.hub.num_feeds == 0 and pool.num_feeds == 1, "the Router lets go")

    play(scene, "ab")


def test_loads_of_all_replicas_are_known_with_the_first_answer() -> None:
    async def scene(cluster: Cluster) -> None:
        (pool,) = cluster.pools
        await until(lambda: bool(pool.book.replicas()), "the first answer")
        assert len(pool.book.replicas()) == 4

    play(scene, "abcd")


def test_a_silent_router_loses_its_feed_and_an_idle_cache_says_nothing() -> None:
    async def main() -> None:
        log = KVEventLog("a", "1")
        hub = FeedHub(log, lease_s=0.0)
        report = Replica("a").report()
        first = hub.open("x", report)
        second = hub.open("x", report)  # the same Router again: the old feed ends
        assert len([frame async for frame in first.frames()]) == 1
        assert not hub.publish(report, force=False)
        assert hub.publish(report, force=True)
        await asyncio.sleep(0)
        hub.renew("somebody else")
        hub.expire()
        assert hub.num_feeds == 0
        assert len([frame async for frame in second.frames()]) == 2

    asyncio.run(main())


def test_levels_of_a_decision() -> None:
    book = LoadBook(create_policy("prefix_aware"), index=PrefixIndex())
    assert book.route(RouteQuery(40, 10, hashes(1, 2))) is None
    book.report(report_of("a"))
    first = book.route(RouteQuery(40, 10, hashes(1, 2)))
    second = book.route(RouteQuery(40, 10, hashes(1, 2)))
    assert first is not None
    assert second is not None
    assert (first.level, second.level) == ("load", "speculative")
    plain = LoadBook(create_policy("least_outstanding_tokens"), index=PrefixIndex())
    plain.report(report_of("a"))
    third = plain.route(RouteQuery(40, 10, hashes(1, 2)))
    assert third is not None
    assert third.level == "load"


def report_of(name: str) -> LoadReport:
    return LoadReport("m", name, "1", True, 0, 0, 0, 64, BLOCK_SIZE, 0)
