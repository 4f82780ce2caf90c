"""What an operator does: a new configuration, fewer replicas, a node that is taken back."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from loadtest.faults.crowd import crowded
from loadtest.faults.fault import Fault
from loadtest.faults.shapes import ROOMY, ROOMY_NODES
from loadtest.faults.site import Site

_LIMIT_S = 700.0  # more than Serve gives a replica to end
_DEADLINE_S = 300


async def _update(site: Site, rng: random.Random) -> list[str]:
    """`serve deploy` of a changed engine option, which replaces every replica one after the other."""
    old = await asyncio.to_thread(site.replicas)

    def change(application: dict[str, Any]) -> None:
        application["args"]["models"][0]["engine"]["max_num_seqs"] = rng.randint(64, 127)

    await asyncio.to_thread(site.deploy, change)
    if not await site.until(lambda: not old & site.replicas(), _LIMIT_S):
        return ["the update did not end"]
    return []


async def scale_down(site: Site, rng: random.Random) -> list[str]:
    """One replica instead of two; returns once the other's process is gone."""

    def change(application: dict[str, Any]) -> None:
        application["deployments"] = [{"name": "Engine-tiny-chat", "num_replicas": 1}]

    await asyncio.to_thread(site.deploy, change)
    if not await site.until(lambda: len(site.replicas()) == 1 == site.counts()["engine"], _LIMIT_S):
        return ["the replica did not go"]
    return []


async def _scale_up(site: Site) -> None:
    await asyncio.to_thread(site.deploy, lambda application: None)


async def _drain(site: Site, rng: random.Random) -> list[str]:
    """`manta drain` of a node; another one is there for what it had. Its ingress stays until its streams have ended."""
    old = await asyncio.to_thread(site.replicas)
    (node,) = await asyncio.to_thread(site.nodes.others)
    await asyncio.to_thread(site.nodes.add)
    began = time.monotonic()
    command = asyncio.create_task(asyncio.to_thread(site.nodes.drain, node, _DEADLINE_S))
    gone = await site.until(lambda: len(old & site.replicas()) == 1, _DEADLINE_S)
    print(f"the replica was out of service after {time.monotonic() - began:.1f} s", flush=True)
    try:
        await command
    except RuntimeError as error:
        return [str(error)[-200:]]
    print(f"the node had no replica after {time.monotonic() - began:.1f} s", flush=True)
    return [] if gone else ["the replica did not go"]


FAULTS = (
    Fault("rolling_update", 20, "`serve deploy` of a changed engine option", crowded(_update), shape=ROOMY,
          keeps_on=True, is_long=True),
    Fault("scale_down", 20, "`serve deploy` of one replica instead of two", crowded(scale_down), _scale_up,
          shape=ROOMY, keeps_on=True, is_long=True),
    Fault("node_drained", 20, "a node is taken back: `manta drain`", crowded(_drain), shape=ROOMY_NODES,
          keeps_on=True, ends_site=True, is_long=True),
)  # fmt: skip
