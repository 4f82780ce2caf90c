"""Harm from within an engine: an input that ends its process, and false news of its cache."""

from __future__ import annotations

import asyncio
import random

from loadtest.faults.fault import Fault
from loadtest.faults.mix import COMPLETIONS, POISON_SEED, Ask
from loadtest.faults.reply import Reply, is_readable, send
from loadtest.faults.shapes import HARMFUL
from loadtest.faults.site import Site
from loadtest.faults.traffic import client

_OBSERVED_S = 10.0
_AGAIN = 6


async def _poison(site: Site, rng: random.Random) -> list[str]:
    """Its client is told, and at most two replicas are lost; asked again, by whichever ingress, none is."""
    before = {process.pid for process in site.part("engine")}
    reply = await _ask(site)
    await asyncio.to_thread(site.look)
    lost = before - {process.pid for process in site.part("engine")}
    found = [] if len(lost) <= 2 else [f"{len(lost)} replicas lost to one request"]
    again = [await _ask(site) for _ in range(_AGAIN)]
    if any("refused for another" not in one.refusal for one in again) and "which all others need" not in reply.refusal:
        found.append(f"asked again: {[one.refusal or one.broke for one in again]}"[:300])
    if reply.status != 500 or not is_readable(reply.refusal) or reply.headers.get("x-should-retry") != "false":
        found.append(f"the poisonous request got {reply.status}: {reply.refusal or reply.broke or reply.end}"[:200])
    return found


async def _ask(site: Site) -> Reply:
    reply = Reply(Ask("poison", COMPLETIONS, {"prompt": "harm", "seed": POISON_SEED, "max_tokens": 5}))
    async with client(site.base_url) as http:
        await send(http, reply, 60.0)
    return reply


async def _observe(site: Site, rng: random.Random) -> list[str]:
    """The news are false all the time; clients go on asking."""
    await asyncio.sleep(_OBSERVED_S)
    return []


FAULTS = (
    Fault("poison", 19, "a request that ends every engine that takes it", _poison, shape=HARMFUL, leaves_marks=True,
          why="the poisonous request itself; and where it meets the last replica, all others wait for a new one"),
    Fault("garbled_kv_events", 22, "what the Routers hear of the caches is lost, doubled, late or made up", _observe,
          shape=HARMFUL, keeps_on=True),
)  # fmt: skip
