"""Several ranks at once over socket pairs, without Ray."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from app.engine.executor.worker_group.connection import FrameConnection
from app.engine.executor.worker_group.group import Rank, RankFailedError, WorkerGroup
from tests import limits

Set = tuple[WorkerGroup, list[FrameConnection]]


@pytest.fixture
def three() -> Iterator[Set]:
    """A worker group of three ranks, and the workers' ends."""
    pairs = [socket.socketpair() for _ in range(3)]
    ends = [FrameConnection(worker) for _, worker in pairs]
    ranks = [
        Rank(rank, None, FrameConnection(driver), 100 + rank, "host", same_node=True)
        for rank, (driver, _) in enumerate(pairs)
    ]
    yield WorkerGroup(ranks), ends
    for end in ends + [rank.connection for rank in ranks]:
        end.close()


def test_broadcast_and_gather_in_the_order_of_ranks(three: Set) -> None:
    worker_group, ends = three
    worker_group.broadcast(b"step message", limits.patience_s())
    assert [end.recv(limits.patience_s()) for end in ends] == [b"step message"] * 3
    for rank in (2, 0, 1):
        ends[rank].send(b"%d" % rank)
    assert worker_group.gather(limits.patience_s()) == [b"0", b"1", b"2"]


def test_a_fast_rank_may_be_steps_ahead(three: Set) -> None:
    worker_group, ends = three
    for step in range(3):
        ends[1].send(b"%d" % step)
    late = threading.Timer(0.1, lambda: [ends[rank].send(b"%d" % step) for step in range(3) for rank in (0, 2)])
    late.start()
    assert [worker_group.gather(limits.patience_s()) for _ in range(3)] == [[b"0"] * 3, [b"1"] * 3, [b"2"] * 3]
    late.join()


def test_any_death_ends_the_wait(three: Set) -> None:
    """Rank 0 waits for rank 2 in a collective, say: its silence must not hide that rank 2 is gone."""
    worker_group, ends = three
    ends[1].send(b"done")
    threading.Timer(0.1, ends[2].close).start()
    with pytest.raises(RankFailedError, match=r"worker rank 2 \(pid 102 on host\) is gone") as caught:
        worker_group.gather(limits.patience_s())
    assert caught.value.rank.rank == 2
    with pytest.raises(RankFailedError, match="rank 2"):
        worker_group.check()
    with pytest.raises(RankFailedError, match="rank 2"):
        worker_group.broadcast(b"next", limits.patience_s())


def test_the_death_of_a_rank_that_answered_counts_too(three: Set) -> None:
    worker_group, ends = three
    ends[1].send(b"done")
    threading.Timer(0.1, ends[1].close).start()
    with pytest.raises(RankFailedError, match="rank 1"):
        worker_group.gather(limits.patience_s())


def test_the_hung_rank_is_named(three: Set) -> None:
    worker_group, ends = three
    for rank in (0, 2):
        ends[rank].send(b"done")
    with pytest.raises(RankFailedError, match=r"rank 1 .* did not answer within 0\.2 s"):
        worker_group.gather(0.2)


def test_a_worker_group_shut_down_meanwhile(three: Set) -> None:
    worker_group, _ = three
    for rank in worker_group.ranks:
        rank.connection.close()
    with pytest.raises(RankFailedError):
        worker_group.gather(limits.patience_s())
    with pytest.raises(RankFailedError):
        worker_group.check()
