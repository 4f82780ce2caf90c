"""A bad link between two nodes, the deployment's halves on either side: nothing passes, or late, or only in part."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict
from typing import Any

from loadtest.faults.fault import Fault, Strike
from loadtest.faults.nodes import no_network
from loadtest.faults.relay import Link
from loadtest.faults.shapes import FAR_NODES
from loadtest.faults.site import Site

_COMES_BACK_S = 20.0  # a node that was not given up


def _while_it_is(link: Link, seconds: float) -> Strike:
    async def strike(site: Site, rng: random.Random) -> list[str]:
        site.nodes.set_link(asdict(link))
        await asyncio.sleep(seconds)
        site.nodes.set_link(asdict(Link()))
        return []

    return strike


async def _replace_lost(site: Site) -> None:
    """Ray ends a node that it had given up, once it hears of it again: another one takes its place."""
    if not await site.until(site.is_whole, _COMES_BACK_S):
        await asyncio.to_thread(site.nodes.add)


def _fault(name: str, what: str, link: Link, seconds: float, **options: Any) -> Fault:
    strike = _while_it_is(link, seconds)
    why = "the connections that an ingress of the far node held may end with the link"
    return Fault(
        name, 12, what, strike, _replace_lost, FAR_NODES, keeps_on=True, why=why, obstacle=no_network, **options
    )


FAULTS = (
    _fault("partition_5s", "nothing passes between two nodes for 5 s", Link(loss=1.0), 5.0),
    _fault("partition_30s", "nothing passes between two nodes for 30 s", Link(loss=1.0), 30.0, is_long=True),
    _fault("partition_120s", "nothing passes between two nodes for 120 s", Link(loss=1.0), 120.0, is_long=True),
    _fault("half_open_30s", "packets pass in one direction only for 30 s", Link(loss=1.0, one_way=True), 30.0,
           is_long=True),
    _fault("lossy_link", "a fifth of the packets vanishes, all take 200 ms, for 10 s", Link(0.2, 0.2), 10.0),
    _fault("narrow_link", "a tenth of a megabyte passes a second, for 10 s", Link(bytes_per_s=1e5), 10.0),
)  # fmt: skip
