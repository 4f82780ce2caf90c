"""`manta drain`, over a cluster of nodes that leave when they are told, or do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated import autoscaler_pb2
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from app.cli import drain, main

HERE, THERE = "ab" * 28, "cd" * 28


class Gcs:
    """Of two nodes with a replica each; one that drains has none `looks` looks later, if at all."""

    def __init__(self) -> None:
        self.addresses = {HERE: "10.0.0.1", THERE: "10.0.0.2"}
        self.drained: list[tuple[str, int, int]] = []
        self.looks = 3
        self.accepts = True

    def get_all_node_info(self, timeout: float) -> dict[bytes, Any]:
        return {
            bytes.fromhex(node): SimpleNamespace(node_manager_address=address, state=GcsNodeInfo.ALIVE)
            for node, address in self.addresses.items()
        }

    async def async_get_all_actor_info(self, actor_state_name: str, **_: Any) -> dict[int, Any]:
        assert actor_state_name == "ALIVE"
        self.looks -= 1
        gone = {node for node, _, _ in self.drained} if self.looks < 0 else set()
        names = {node: f"SERVE_REPLICA::manta#Engine#{node[:2]}" for node in self.addresses if node not in gone}
        actors = [*names.items(), *((node, "a store") for node in self.addresses)]
        return {
            number: SimpleNamespace(name=name, address=SimpleNamespace(node_id=bytes.fromhex(node)))
            for number, (node, name) in enumerate(actors)
        }

    def drain_node(self, node_id: str, reason: int, message: str, deadline_ms: int, timeout: float) -> tuple[bool, str]:
        self.drained.append((node_id, reason, deadline_ms))
        return self.accepts, "it must not"


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Gcs:
    gcs = Gcs()
    monkeypatch.setattr(drain, "probe", lambda address: SimpleNamespace(address=address))
    monkeypatch.setattr(drain, "_connect", lambda address: gcs)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(drain, "time", SimpleNamespace(sleep=lambda seconds: None, time=lambda: 1000.0))
    return gcs


def test_it_waits_until_this_machines_node_has_no_replica(gcs: Gcs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "--address", "10.0.0.1:6379", "--deadline-s", "25"]) == 0
    assert gcs.drained == [(HERE, autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, 1_025_000)]
    assert gcs.looks < 0
    assert "has no replica any more" in capsys.readouterr().out


def test_a_node_that_stays_is_said_at_the_deadline(
    gcs: Gcs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gcs.looks = 10**9
    clock = iter(range(1000, 2000))
    monkeypatch.setattr(drain, "time", SimpleNamespace(sleep=lambda seconds: None, time=lambda: float(next(clock))))
    assert main(["drain", "--address", "x:1", "--node-id", THERE]) == 1
    assert [node for node, _, _ in gcs.drained] == [THERE]
    assert "still has manta#Engine#cd at the deadline" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("addresses", "arguments", "code", "said"),
    [
        ({}, ["--deadline-s", "0"], 2, "--deadline-s"),
        ({}, ["--node-id", "ef" * 28], 2, "no node"),
        ({THERE: "10.0.0.1"}, [], 2, "2 nodes of the cluster run at 10.0.0.1"),
        ({HERE: "10.0.0.3"}, [], 2, "0 nodes"),
    ],
)
def test_mistakes_are_named(
    gcs: Gcs, addresses: dict[str, str], arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gcs.addresses |= addresses
    assert main(["drain", "--address", "x:1", *arguments]) == code
    assert said in capsys.readouterr().err
    assert gcs.drained == []


def test_a_refusal_of_ray_is_an_error(gcs: Gcs, capsys: pytest.CaptureFixture[str]) -> None:
    gcs.accepts = False
    assert main(["drain", "--address", "x:1"]) == 1
    assert "it must not" in capsys.readouterr().err
