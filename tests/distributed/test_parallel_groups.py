"""The groups of four real processes (gloo), 2 stages x 2: who is in which, their collectives, what stages exchange.

Whole models over such groups: tests/engine/executor/test_parallel_tokens.py.
"""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.queues import Queue
from typing import Any

import psutil
import pytest
import torch

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.distributed.process_groups import RankStore, _set_environment, interface_to
from app.distributed.stage_link import StageLink
from app.records.worker_info import RendezvousInfo
from tests import limits
from tests.distributed.worker_group_of_four import CPU, NUM_STEPS, rank_main
from tests.engine.executor.forked_executor import CONTEXT


@pytest.mark.skipif(sys.platform != "linux", reason="gloo over the loopback interface")
def test_four_ranks() -> None:
    store = RankStore("127.0.0.1", 4)
    results: Queue[Any] = CONTEXT.Queue()
    ranks = [CONTEXT.Process(target=rank_main, args=(rank, store.address, results), daemon=True) for rank in range(4)]
    for process in ranks:
        process.start()
    told = {answer["rank"]: answer for answer in (results.get(timeout=limits.patience_s()) for _ in ranks)}
    for process in ranks:
        process.join(limits.patience_s())
        assert process.exitcode == 0
    for rank, answer in told.items():
        stage, column = divmod(rank, 2)
        assert answer["tp"] == (column, 2, (11.0, 1100.0)[stage])
        assert answer["pp"] == answer["feedback"] == (stage, 2, (101.0, 1010.0)[column])
        first = 2 * stage
        assert answer["gathered"] == [[first, first + 1], [10 + first, 11 + first]]
        assert answer["stage"] == (stage == 0, stage == 1)
    for column in range(2):
        hidden = [100 * column + step for step in range(NUM_STEPS)]
        assert told[2 + column]["stages"] == hidden
        assert told[column]["stages"] == [[step, value] for step, value in enumerate(hidden)]


@pytest.mark.skipif(sys.platform != "linux", reason="its name is another elsewhere")
def test_the_interface_that_leads_to_the_store() -> None:
    assert interface_to("127.0.0.1") == "lo"
    assert interface_to("no:address") is None
    for addresses in psutil.net_if_addrs().values():
        for own in addresses:
            if own.family == socket.AF_INET:
                found = interface_to(own.address)
                assert found is not None
                assert own.address in [entry.address for entry in psutil.net_if_addrs()[found]]


def test_the_environment_of_the_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE", "GLOO_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # to be undone afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    _set_environment("127.0.0.1")
    assert [os.environ.get(name, "") for name in names] == ["1", "1", "lo" if sys.platform == "linux" else ""]


def test_who_shares_a_node() -> None:
    rendezvous = RendezvousInfo(("10.0.0.1", 5), ("a", "a", "b", "b"))
    assert [rendezvous.share_a_node(ranks) for ranks in (range(2), range(2, 4), range(1, 3), range(4))] == [
        *(True, True, False, False)
    ]


def test_one_rank_costs_nothing() -> None:
    tensor = torch.ones(3)
    assert RankGroup().all_reduce(tensor) is tensor
    assert RankGroup().all_gather(tensor) is tensor
    assert RankGroup().share_of(7, "anything") == 7
    link = StageLink(ParallelGroups(), 8, torch.float32, CPU, 2)
    assert link.receive_hidden(5) is None
    link.send_hidden(tensor)
    link.send_tokens(tensor)


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(AssertionError, match="need a process group"):
        RankGroup(0, 2)
