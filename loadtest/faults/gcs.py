"""Ray's head goes: its GCS with and without Redis behind it, and a node's raylet."""

from __future__ import annotations

import asyncio
import random
import signal

from loadtest.faults.fault import Fault, Strike
from loadtest.faults.nodes import no_redis
from loadtest.faults.shapes import NODES, REDIS
from loadtest.faults.signals import send
from loadtest.faults.site import Site

_OBSERVED_S = 75.0


async def _kill_for_good(site: Site, rng: random.Random) -> list[str]:
    """The fuse is 60 s long; clients go on asking all the while."""
    findings = await send(signal.SIGKILL, "gcs")(site, rng)
    await asyncio.sleep(_OBSERVED_S)
    return findings


def _outage(seconds: float) -> Strike:
    async def strike(site: Site, rng: random.Random) -> list[str]:
        before = {process.pid for part in ("engine", "worker", "ingress", "router") for process in site.part(part)}
        await asyncio.to_thread(site.nodes.kill_gcs)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(site.nodes.revive_gcs)
        await asyncio.sleep(5.0)
        await asyncio.to_thread(site.look)
        after = {process.pid for part in ("engine", "worker", "ingress", "router") for process in site.part(part)}
        return [] if before == after else [f"{len(before - after)} processes of the deployment went with the GCS"]

    return strike


async def _kill_node(site: Site, rng: random.Random) -> list[str]:
    """The raylet of the node that is not the head: Ray's workers on it lose their parent."""
    process = site.part("raylet")[-1]
    process.kill()
    return []


async def _replace_node(site: Site) -> None:
    await asyncio.to_thread(site.nodes.add)


FAULTS = (
    Fault("node_killed", 8, "the raylet of one of two nodes: SIGKILL", _kill_node, _replace_node, shape=NODES,
          why="the connections that an ingress of that node held end with it"),
    Fault("gcs_killed", 9, f"the GCS, without Redis: SIGKILL, seen for {_OBSERVED_S:.0f} s", _kill_for_good,
          keeps_on=True, ends_site=True, is_long=True, restore_s=1.0,
          why="without Redis Ray's own processes end 60 s after their GCS; see docs/running.md"),
    Fault("gcs_down_20s", 10, "the GCS with Redis: SIGKILL, back after 20 s", _outage(20.0), shape=REDIS,
          keeps_on=True, obstacle=no_redis),
    Fault("gcs_down_75s", 10, "the GCS with Redis: SIGKILL, back after 75 s", _outage(75.0), shape=REDIS,
          keeps_on=True, is_long=True, obstacle=no_redis),
)  # fmt: skip
