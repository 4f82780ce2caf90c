"""Processes that are killed, or stopped and left where they are."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal

import psutil

from loadtest.faults.fault import Fault, Heal, Strike
from loadtest.faults.shapes import EXACT, WORKER_GROUP
from loadtest.faults.site import Site

_GOES_S = 120.0  # that a process may take to end in good order
_OWN_CONNECTIONS = "the connections of its clients end with its process"


def send(number: signal.Signals, *parts: str, every: bool = False, after_s: float = 0.0) -> Strike:
    """A signal to one process of each part, chosen at random, or to `every` one; `after_s` lie between the parts."""

    async def strike(site: Site, rng: random.Random) -> list[str]:
        struck = site.notes.setdefault("struck", [])
        for part in parts:
            if struck and after_s:
                await asyncio.sleep(after_s)
            processes = site.part(part)
            if not processes:
                return [f"no process of part {part} to strike"]
            for process in processes if every else [rng.choice(processes)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
                struck.append(process)
        return []

    return strike


def _resume() -> Heal:
    async def heal(site: Site) -> None:
        for process in site.notes.pop("struck", []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    return heal


def kill(name: str, case: int, what: str, *parts: str, why: str = "", **options: object) -> Fault:
    """SIGKILL."""
    strike_options = {key: options.pop(key) for key in ("every", "after_s") if key in options}
    strike = send(signal.SIGKILL, *parts, **strike_options)  # type: ignore[arg-type]
    return Fault(name, case, what, strike, why=why, **options)  # type: ignore[arg-type]


def end(name: str, case: int, what: str, part: str, why: str = "") -> Fault:
    """SIGTERM: what an operator's `kill` sends, and a machine that is being switched off."""
    return Fault(name, case, what, until_gone(send(signal.SIGTERM, part)), why=why)


def until_gone(strike: Strike, limit_s: float = _GOES_S) -> Strike:
    """The same strike, which returns once what it struck has gone: until then a deployment only seems whole."""

    async def strike_and_wait(site: Site, rng: random.Random) -> list[str]:
        findings = await strike(site, rng)
        struck = site.notes.get("struck", [])
        if await site.until(lambda: not any(process.is_running() for process in struck), limit_s):
            return findings
        return [*findings, f"what was to end was still there after {limit_s:.0f} s"]

    return strike_and_wait


def stop(name: str, case: int, what: str, part: str, why: str = "", **options: object) -> Fault:
    """SIGSTOP; SIGCONT once the streams have ended."""
    return Fault(name, case, what, send(signal.SIGSTOP, part), _resume(), why=why, **options)  # type: ignore[arg-type]


FAULTS = (
    kill("worker_killed", 1, "the worker of a replica: SIGKILL", "worker"),
    kill("rank_killed", 1, "one of two tensor-parallel workers: SIGKILL", "worker", shape=WORKER_GROUP),
    kill("engine_killed", 2, "an engine replica: SIGKILL", "engine"),
    kill("exact_engine_killed", 2, "one of two in bf16, `deterministic: batch`, judged to the bit: SIGKILL", "engine",
         shape=EXACT),
    kill(
        "all_engines_killed", 3, "both engine replicas: SIGKILL", "engine", every=True,
        why="no replica is left until a new one has started",
    ),
    end("engine_ended", 2, "an engine replica: SIGTERM", "engine"),
    end("worker_ended", 1, "the worker of a replica: SIGTERM", "worker"),
    kill("router_killed", 4, "the Router: SIGKILL", "router"),
    kill("ingress_killed", 5, "one of two ingresses: SIGKILL", "ingress", why=_OWN_CONNECTIONS),
    end("ingress_ended", 5, "one of two ingresses: SIGTERM", "ingress"),
    kill("haproxy_killed", 6, "the node's only HAProxy: SIGKILL", "haproxy", why=_OWN_CONNECTIONS),
    kill(
        "haproxy_manager_killed", 6, "the actor that looks after HAProxy: SIGKILL", "haproxy_manager",
        why="Ray's new manager starts HAProxy anew, and connections end with the old one",
    ),
    kill("controller_killed", 7, "the Serve controller: SIGKILL", "controller"),
    kill(
        "controller_and_engine_killed", 7, "the controller, then an engine while it is down: SIGKILL",
        "controller", "engine", after_s=0.2,
    ),
    stop("engine_stopped", 11, "an engine replica: SIGSTOP", "engine"),
    stop("worker_stopped", 11, "the worker of a replica: SIGSTOP", "worker"),
    stop("rank_stopped", 11, "one of two tensor-parallel workers: SIGSTOP", "worker", shape=WORKER_GROUP),
    stop("router_stopped", 11, "the Router: SIGSTOP", "router"),
    stop("ingress_stopped", 11, "one of two ingresses: SIGSTOP", "ingress", why=_OWN_CONNECTIONS),
    stop("controller_stopped", 11, "the Serve controller: SIGSTOP", "controller"),
)  # fmt: skip
