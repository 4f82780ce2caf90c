"""`manta drain`: this machine's node of a Ray cluster is about to go; its replicas and their streams leave it first.

For a spot notice, for an operator, and for what runs before a pod is stopped. Ray marks the node as draining; Serve
starts replacements elsewhere and takes the node's replicas out of service once they run, or when the time is up; the
ingresses carry the streams over. A node on which nothing at all runs any more leaves the cluster by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from app.cli.cluster import cluster_address, probe
from app.cli.command import Command, CommandError
from app.errors import ConfigError

RPC_TIMEOUT_S = 10.0
POLL_S = 1.0
REPLICA = "SERVE_REPLICA::"  # how Serve names its actors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("--address", help="host:port of the cluster's GCS; by default RAY_ADDRESS, or this machine's")
    parser.add_argument("--node-id", help="the node, in hexadecimal; by default the one that runs on this machine")
    parser.add_argument(
        "--deadline-s", type=int, default=60, help="seconds until the machine goes (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Returns once no replica is left on the node; CommandError when that takes longer than the deadline."""
    if args.deadline_s <= 0:
        raise ConfigError(f"--deadline-s: {args.deadline_s} is not above 0")
    address = args.address or cluster_address()
    if address is None:
        raise CommandError("no Ray cluster runs on this machine; --address names one elsewhere")
    gcs = _connect(probe(address).address)
    node_id = args.node_id or _own_node(gcs)
    deadline = time.time() + args.deadline_s
    _announce(gcs, node_id, deadline)
    print(f"node {node_id} drains, {args.deadline_s} s at most")
    while replicas := asyncio.run(_replicas(gcs, node_id)):
        if time.time() > deadline:
            raise CommandError(f"node {node_id} still has {', '.join(replicas)} at the deadline")
        time.sleep(POLL_S)
    print(f"node {node_id} has no replica any more")
    return 0


def _connect(address: str) -> Any:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, without stubs

    return GcsClient(address=address)


def _announce(gcs: Any, node_id: str, deadline: float) -> None:
    from ray.core.generated import autoscaler_pb2

    if node_id not in _alive(gcs):
        raise ConfigError(f"--node-id: the cluster has no node {node_id}")
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # one that Ray may not refuse
    accepted, why = gcs.drain_node(node_id, reason, "manta drain", int(deadline * 1000), timeout=RPC_TIMEOUT_S)
    if not accepted:
        raise CommandError(f"Ray does not drain node {node_id}: {why}")


def _alive(gcs: Any) -> dict[str, str]:
    """Address by id of the nodes that have not left."""
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    nodes = gcs.get_all_node_info(timeout=RPC_TIMEOUT_S)
    return {
        node_id.hex(): node.node_manager_address for node_id, node in nodes.items() if node.state == GcsNodeInfo.ALIVE
    }


async def _replicas(gcs: Any, node_id: str) -> list[str]:
    """Serve's replicas on the node, by name."""
    actors = await gcs.async_get_all_actor_info(actor_state_name="ALIVE", timeout=RPC_TIMEOUT_S)
    found = [actor.name for actor in actors.values() if actor.address.node_id.hex() == node_id]
    return sorted(name.removeprefix(REPLICA) for name in found if name.startswith(REPLICA))


def _own_node(gcs: Any) -> str:
    from ray.util import get_node_ip_address

    here = get_node_ip_address()
    found = [node_id for node_id, address in _alive(gcs).items() if address == here]
    if len(found) != 1:
        raise ConfigError(f"--node-id: {len(found)} nodes of the cluster run at {here}; name one of them")
    return found[0]


COMMAND = Command("let replicas and streams leave this machine's Ray node before it goes", add_arguments, run)
