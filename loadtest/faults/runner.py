"""One run of one fault: traffic, strike, wait, heal, wait until whole, and what came of it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

from loadtest.faults.fault import Fault
from loadtest.faults.judge import Verdict
from loadtest.faults.mix import Ask
from loadtest.faults.reply import Reply
from loadtest.faults.results import Run
from loadtest.faults.site import Site
from loadtest.faults.traffic import Goldens, Traffic

HUNG_S = 120.0  # a stream that has not ended so long after the strike never will
FREE_S = 15.0  # for requests, blocks and processes to be gone once nothing is asked for
_SHOWN_ERRORS = 3  # of each kind, in the results


@dataclass(slots=True)
class Struck:
    """What was seen around the strike; times of time.monotonic(), in seconds."""

    at: float = 0.0
    findings: list[str] = field(default_factory=list)
    whole_at: float | None = None
    replicas_before: set[str] = field(default_factory=set)
    replicas_after: set[str] = field(default_factory=set)


async def run(fault: Fault, site: Site, goldens: Goldens, asks: Sequence[Ask], seed: int) -> Run:
    """Run `fault` once; it strikes at any moment of the streams, from their prompts to their last tokens."""
    rng, struck, began = random.Random(seed), Struck(), time.monotonic()
    site.notes.clear()
    await asyncio.to_thread(site.look)
    pids = {process.pid for process in await asyncio.to_thread(site.processes)}
    struck.replicas_before = await asyncio.to_thread(site.replicas)
    async with Traffic(site.base_url, asks, HUNG_S, keeps_on=fault.keeps_on) as traffic:
        await asyncio.sleep(0.3 * rng.random())
        await traffic.reach((1.1 * rng.random() - 0.15) * goldens.size)
        struck.at = time.monotonic()
        struck.findings += await fault.strike(site, rng)
        whole = asyncio.create_task(_until_whole(site, struck))
        await traffic.finish()
        if fault.heal is not None:
            await fault.heal(site)
        await asyncio.wait([whole], timeout=fault.restore_s)
        whole.cancel()
    if struck.whole_at is None and not fault.ends_site:
        struck.findings.append(f"not whole again: {', '.join(await asyncio.to_thread(site.missing))}")
    struck.replicas_after = await asyncio.to_thread(site.replicas)
    struck.findings += await _leaks(site, pids) if struck.whole_at is not None else []
    outcome = _outcome(fault, traffic, goldens, struck)
    outcome.seed, outcome.seconds = seed, round(time.monotonic() - began, 1)
    return outcome


async def _until_whole(site: Site, struck: Struck) -> None:
    """Note the moment; it is for the caller to wait no longer."""
    await asyncio.sleep(1.0)  # what was struck is not missed at once
    while struck.whole_at is None:
        if await asyncio.to_thread(site.is_whole):
            struck.whole_at = time.monotonic()
        await asyncio.sleep(0.25)


async def _leaks(site: Site, pids: set[int]) -> list[str]:
    """What is still held or running although nobody asks for anything."""
    found = []
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        if not await site.until(lambda name=name: site.metric(name) == 0, FREE_S):  # type: ignore[misc]
            found.append(f"leak: {name} is {site.metric(name)}")
    if not await site.until(lambda: not site.surplus(), FREE_S):
        found.append(f"leak: {', '.join(site.surplus())}")
    if not await site.until(lambda: not _orphans(site, pids), FREE_S):
        found.append(f"leak: orphans {', '.join(_orphans(site, pids))}")
    return found


def _orphans(site: Site, pids: set[int]) -> list[str]:
    """Processes that belonged to the deployment, live on, and belong to it no more."""
    lost = pids - {process.pid for process in site.processes()}
    return [_title(pid) for pid in lost if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def _title(pid: int) -> str:
    return " ".join(psutil.Process(pid).cmdline())[:80].strip()


def _outcome(fault: Fault, traffic: Traffic, goldens: Goldens, struck: Struck) -> Run:
    verdicts = [goldens.judge(reply) for reply in traffic.replies]
    probes = [goldens.judge(reply) for reply in traffic.probes]
    failed = [reply for reply, verdict in zip(traffic.probes, probes, strict=True) if verdict.kind != "ok"]
    gone = struck.replicas_before - struck.replicas_after
    pairs = list(zip(traffic.replies, verdicts, strict=True))
    alive = [reply for reply, verdict in pairs if verdict.kind == "ok" and reply.ended > struck.at]
    touched = [reply for reply in alive if reply.replica in gone]
    untouched = [reply for reply in alive if reply.replica not in gone]
    before = [gap for reply in traffic.replies for gap in reply.gaps(until=struck.at)]
    after = [gap for reply in untouched for gap in reply.gaps(since=struck.at)]
    return Run(
        fault=fault.name,
        outcomes=dict(Counter(verdict.kind for verdict in verdicts)),
        probes=dict(Counter(verdict.kind for verdict in probes)),
        errors=_errors(traffic.replies, verdicts) + _errors(traffic.probes, probes),
        outage_s=round(failed[-1].ended - failed[0].began, 2) if failed else 0.0,
        served_s=round(failed[0].began - struck.at, 2) if failed else None,
        probe_max_s=round(max((reply.ended - reply.began for reply in traffic.probes), default=0.0), 3),
        whole_s=None if struck.whole_at is None else round(struck.whole_at - struck.at, 2),
        stalls_s=[round(max(reply.gaps(struck.at), default=0.0), 3) for reply in touched],
        longest_gap_s=round(max(after, default=0.0), 3),
        itl_p99_before_s=_p99(before),
        itl_p99_after_s=_p99(after),
        findings=struck.findings,
        load=round(os.getloadavg()[0], 2),
    )


def _p99(gaps: list[float]) -> float:
    return round(float(np.percentile(gaps, 99)), 4) if gaps else 0.0


def _errors(replies: Sequence[Reply], verdicts: Sequence[Verdict]) -> list[str]:
    """A few of each kind, in words."""
    shown: Counter[str] = Counter()
    lines = []
    for reply, verdict in zip(replies, verdicts, strict=True):
        if verdict.kind != "ok" and shown[verdict.kind] < _SHOWN_ERRORS:
            shown[verdict.kind] += 1
            lines.append(f"{verdict.kind}: {reply.ask.name}: {verdict.why}"[:300])
    return lines
