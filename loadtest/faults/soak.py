"""Half an hour of random faults, one every twenty seconds, while clients go on asking."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence

import psutil

from loadtest.faults import clients, signals
from loadtest.faults.fault import Fault, Strike
from loadtest.faults.site import Site

_EVERY_S, _FOR_S, _STOPPED_S = 20.0, 1800.0, 10.0
# Those that leave a client's own connection alone, but for HAProxy's manager.
_KINDS = (
    "worker_killed", "engine_killed", "router_killed", "controller_killed", "controller_and_engine_killed",
    "haproxy_manager_killed", "engine_stopped", "worker_stopped", "router_stopped", "controller_stopped",
    "slow_clients", "disconnect_storm", "bad_input",
)  # fmt: skip


def soak(faults: Sequence[Fault], for_s: float, every_s: float) -> Strike:
    """A strike of random faults one after the other; each comes to a deployment that is whole again."""

    async def strike(site: Site, rng: random.Random) -> list[str]:
        end, findings = time.monotonic() + for_s, []
        while time.monotonic() < end:
            await asyncio.to_thread(site.look)
            fault, began = rng.choice(faults), time.monotonic()
            findings += [f"{fault.name}: {finding}" for finding in await fault.strike(site, rng)]
            if fault.heal is not None:
                await asyncio.sleep(_STOPPED_S)
                with contextlib.suppress(psutil.Error):
                    await fault.heal(site)
            site.notes.clear()
            if not await site.until(site.is_whole, fault.restore_s):
                findings.append(
                    f"not whole again after {fault.name}: {', '.join(await asyncio.to_thread(site.missing))}"
                )
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))
        return findings

    return strike


_BY_NAME = {fault.name: fault for family in (signals, clients) for fault in family.FAULTS}
_CHOSEN = [_BY_NAME[name] for name in _KINDS]

FAULTS = (
    Fault("soak", 24, f"a random fault every {_EVERY_S:.0f} s for {_FOR_S / 60:.0f} minutes",
          soak(_CHOSEN, _FOR_S, _EVERY_S), keeps_on=True, is_long=True,
          why="connections end with HAProxy (haproxy_manager_killed), and a request under which three replicas were"
          " killed is held to be the cause"),
)  # fmt: skip
