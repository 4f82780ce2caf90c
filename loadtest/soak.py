"""A soak: clients of every kind for minutes or hours, and what the server's memory does meanwhile.

    python -m loadtest.soak --minutes 120 [--clients 2] [--pause 0.5] [--out results/soak.json]

Starts a server whose stores and caches are small, so that they fill in the first minutes. Clients of two tenants ask
for all that loadtest/faults/mix.py has, chats under an Idempotency-Key, kept and background responses, files, batches,
and leave some streams unread; every --heavy-minutes one asks for the next of loadtest/hostile_loads.py. Each minute
writes the RSS and PSS of each process and the size of each structure that the server counts.

The verdict compares the last two quarters, by their medians: no process may have grown by more than --most-mb, and no
counted structure at all, but for batches, which are kept for 30 days, up to their bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serve_process import ROOT, ServeProcess
from loadtest import memory
from loadtest.faults.mix import Ask, mixed
from loadtest.hostile_loads import BATCHES, CHAT, FILES, LOADS, RESPONSES, Tenant
from loadtest.neighbours import KEYS

CONFIG = ROOT / "configs/serve/quickstart.yaml"
SMALL = {"max_stored_responses": 50, "max_kept_answers": 50, "idempotency_s": 60.0}
KV_BYTES = 32 << 20
TOKENS = 40  # of most answers
GROWS = ('store="batches"',)  # up to a bound that no soak reaches


class Clients:
    """Threads that ask for one thing after the other until they are told to end."""

    def __init__(self, base_url: str, number: int, pause_s: float) -> None:
        self.answers: Counter[str] = Counter()
        self._base_url = base_url
        self._pause_s = pause_s
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(number)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let all finish what they do."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        tenant = Tenant(self._base_url, list(KEYS.values())[number % len(KEYS)])
        asks = mixed(TOKENS)
        others: list[Callable[[], str]] = [
            lambda: self._once_more(tenant, rng),
            lambda: self._kept(tenant, rng),
            lambda: self._file(tenant, rng),
            lambda: self._leave(tenant, rng),
        ]
        while not self._ended.wait(self._pause_s * 2 * rng.random()):
            try:
                if rng.random() < 0.6:
                    status = self._ask(tenant, rng.choice(asks))
                else:
                    status = rng.choice(others)()
            except httpx.HTTPError as error:
                status = type(error).__name__
            self.answers[status] += 1

    def _ask(self, tenant: Tenant, ask: Ask) -> str:
        return str(tenant.post(ask.path, {"model": tenant.model, **ask.body}).status_code)

    def _once_more(self, tenant: Tenant, rng: random.Random) -> str:
        """A chat under a key, twice."""
        body = {"model": tenant.model, "max_tokens": 4, "messages": [{"role": "user", "content": str(rng.random())}]}
        key = {"Idempotency-Key": f"k{rng.random()}"}
        return str(max(tenant.post(CHAT, body, key).status_code for _ in range(2)))

    def _kept(self, tenant: Tenant, rng: random.Random) -> str:
        """A response that is kept, some of them in the background."""
        body = {"model": tenant.model, "input": f"Hi {rng.random()}", "max_output_tokens": 20, "store": True}
        return str(tenant.post(RESPONSES, {**body, "background": rng.random() < 0.3}).status_code)

    def _file(self, tenant: Tenant, rng: random.Random) -> str:
        """A file that is deleted again, one of eight after a batch over it."""
        body = {"model": tenant.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        line = {"method": "POST", "url": CHAT, "body": body}
        lines = [json.dumps({"custom_id": str(i), **line}) for i in range(rng.randrange(1, 2000))]
        is_batch = rng.random() < 0.125
        file_id, made = tenant.upload("\n".join(lines[:20] if is_batch else lines).encode()), []
        if is_batch:
            asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            place = f"{BATCHES}/{tenant.post(BATCHES, asked).json()['id']}"
            while (found := tenant.get(place))["status"] in ("validating", "in_progress", "finalizing"):
                time.sleep(0.5)
            made = [found[name] for name in ("output_file_id", "error_file_id") if found.get(name)]
        for name in (file_id, *made):
            tenant.delete(f"{FILES}/{name}")
        return "batch" if is_batch else "file"

    def _leave(self, tenant: Tenant, rng: random.Random) -> str:
        """A stream whose client goes away."""
        messages = [{"role": "user", "content": f"Tell me {rng.random()}"}]
        body = {"model": tenant.model, "messages": messages, "max_tokens": 400, "ignore_eos": True, "stream": True}
        tenant.leave(CHAT, body)
        return "left"


def verdict(samples: Sequence[Mapping[str, Any]], most_mb: float) -> list[str]:
    """Sentences on what grew from the last quarter but one to the last."""
    quarter = len(samples) // 4
    if not quarter:
        return ["too short: at least four samples are needed"]
    before, after = samples[-2 * quarter : -quarter], samples[-quarter:]
    found = []
    for name in sorted({name for sample in after for name in sample["processes"]}):
        first, last = (_median(part, "processes", name) for part in (before, after))
        if last - first > most_mb:
            found.append(f"{name}: PSS grew from {first:.0f} to {last:.0f} MiB")
    for name in sorted({name for sample in after for name in sample["structures"]}):
        first, last = (_median(part, "structures", name) for part in (before, after))
        if last > first and not any(part in name for part in GROWS):
            found.append(f"{name} grew from {first:.0f} to {last:.0f}")
    return found


def _median(samples: Sequence[Mapping[str, Any]], kind: str, name: str) -> float:
    values = [sample[kind][name] for sample in samples if name in sample[kind]]
    return statistics.median(value["pss"] if kind == "processes" else value for value in values) if values else 0.0


def table(samples: Sequence[Mapping[str, Any]]) -> str:
    """Each process and each structure at the begin, the half and the end, as Markdown."""
    points = [samples[0], samples[len(samples) // 2], samples[-1]]
    minutes = " | ".join(f"minute {point['minute']:.0f}" for point in points)
    lines = [f"| | {minutes} |", "|---|---|---|---|"]
    for name in sorted({name for sample in samples for name in sample["processes"]}):
        cells = [point["processes"].get(name, {"rss": 0.0, "pss": 0.0}) for point in points]
        told = " | ".join(f"{cell['pss']:.0f} ({cell['rss']:.0f})" for cell in cells)
        lines.append(f"| {name}, MiB PSS (RSS) | {told} |")
    for name in sorted({name for sample in samples for name in sample["structures"]}):
        cells = [point["structures"].get(name, 0.0) for point in points]
        lines.append(f"| {name} | " + " | ".join(f"{cell:.0f}" for cell in cells) + " |")
    return "\n".join(lines)


def sample(server: ServeProcess, began_s: float, clients: Clients) -> dict[str, Any]:
    """One line of the record."""
    page = httpx.get(f"{server.base_url}/metrics", headers=_operator(), timeout=60).text
    return {
        "minute": (time.monotonic() - began_s) / 60,
        "machine_load": os.getloadavg()[0],
        "processes": memory.of_processes(server.processes()),
        "structures": memory.of_structures(page),
        "answers": dict(clients.answers),
    }


def _operator() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS['neighbour']}"}


def edit(config: dict[str, Any]) -> None:
    """Small stores and a small cache: what is bounded is full soon."""
    args = config["applications"][0]["args"]
    args["ingress"] = {**args.get("ingress", {}), **SMALL}
    args["models"][0]["engine"]["kv_cache_memory_bytes"] = KV_BYTES


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and report; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between a client's requests, on average")
    parser.add_argument("--heavy-minutes", type=float, default=3.0, help="between two heavy loads; 0: none")
    parser.add_argument("--every-s", type=float, default=60.0, help="seconds between two samples")
    parser.add_argument("--most-mb", type=float, default=8.0, help="growth of a process's PSS that is let pass")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    keys = " ".join(f"{tenant}={key}" for tenant, key in KEYS.items())
    with ServeProcess(CONFIG, edit=edit, ready_timeout_s=400, environ={"MANTA_API_KEYS": keys}) as server:
        samples = run(server, options)
    found = verdict(samples, options.most_mb)
    print(table(samples))
    print(*(found or ["nothing grew in the last half"]), sep="\n")
    _write(options.out, samples, found)
    return int(bool(found))


def run(server: ServeProcess, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The samples of the whole time; they are written as they come."""
    clients, began_s = Clients(server.base_url, options.clients, options.pause), time.monotonic()
    if options.heavy_minutes:
        threading.Thread(target=_strain, args=(server, clients, 60 * options.heavy_minutes), daemon=True).start()
    samples: list[dict[str, Any]] = []
    while (now_s := time.monotonic()) < began_s + 60 * options.minutes:
        if len(samples) * options.every_s <= now_s - began_s:
            samples.append(sample(server, began_s, clients))
            _write(options.out, samples, [])
            total = sum(one["pss"] for one in samples[-1]["processes"].values())
            print(f"minute {samples[-1]['minute']:.1f}: {total:.0f} MiB PSS, load {os.getloadavg()[0]:.1f}", flush=True)
        time.sleep(0.5)
    clients.end()
    return samples


def _strain(server: ServeProcess, clients: Clients, pause_s: float) -> None:
    """One heavy load after the other, for as long as the server lives."""
    tenant = Tenant(server.base_url, KEYS["heavy"])
    for name in itertools.cycle(LOADS):
        time.sleep(pause_s)
        try:
            clients.answers[f"heavy {name}"] += LOADS[name](tenant).total()
        except (httpx.HTTPError, ValueError, LookupError) as error:
            clients.answers[f"heavy {name}: {type(error).__name__}"] += 1


def _write(path: Path | None, samples: Sequence[Mapping[str, Any]], found: Sequence[str]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"samples": samples, "grew": found}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
