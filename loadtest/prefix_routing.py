"""Real engine replicas of the built-in model behind different routers, on the same requests, through HTTP.

    python -m loadtest.prefix_routing --out results/prefix_routing

Four replicas, each with a KV pool for about sixteen of fifty shared prefixes; every prefix is asked about twenty times
in random order, then one of them by a crowd. Routers: ours with the policies prefix_aware and power_of_two; Serve's
default one and Ray's PrefixCacheAffinityRouter over the bare engine (loadtest/plain_app.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.text.tokenizer import Tokenizer
from benchmarks.serve_process import ROOT, ServeProcess
from loadtest.prompts import sentences

MODEL = "tiny-chat"
CONFIG = ROOT / "configs/serve/quickstart.yaml"
BLOCK_SIZE: int = EngineConfig.model_fields["block_size"].default
NUM_REPLICAS = 4
NUM_GROUPS = 50
REQUESTS_PER_GROUP = 20
POOL_PREFIXES = 16
IN_FLIGHT_BLOCKS = 4  # a request's, beside its prefix
PREFIX_WORDS = 260
MAX_TOKENS = 8
# On a crowded machine the ingress would soon place by itself: this compares routers, not what happens without one.
PATIENCE = {"route_timeout_s": 5.0, "lease_s": 60.0}
AFFINITY_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
OURS = ("prefix_aware", "power_of_two")
ROUTERS = (*OURS, "serve_default", "ray_prefix_affinity")


@dataclass(slots=True)
class Answer:
    """One request's outcome; times in seconds."""

    group: int
    replica: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    num_loads: int = 0  # of adapters, by its replica so far; where that tells


@dataclass(slots=True, frozen=True)
class Outcome:
    """One router's figures."""

    router: str
    requests: int
    cached_of_perfect: float
    max_mean_load: float  # requests of the busiest replica / mean
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    wall_s: float
    hot_replicas: int  # that took at least a twentieth of the crowd
    hot_home_share: float  # the part of the crowd on the replica that took most
    failed: int
    levels: dict[str, int]  # how many prompts were placed by what: "ingress" is without the Router


class Prompts:
    """Fifty prefixes and the questions behind them. `perfect` cached tokens: all but each prefix's first use."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.tokenizer = Tokenizer.from_directory(ModelInfo.from_directory(MODEL).directory)
        self.prefixes = [f"Group {i} of {rng.random()}. {sentences(rng, PREFIX_WORDS)}\n" for i in range(NUM_GROUPS)]
        self.jobs = [
            (group, f"{prefix}Question {n}: {sentences(rng, 5)}")
            for group, prefix in enumerate(self.prefixes)
            for n in range(REQUESTS_PER_GROUP)
        ]
        rng.shuffle(self.jobs)
        self.crowd = [(0, f"{self.prefixes[0]}Crowd {n}: {sentences(rng, 5)}") for n in range(96)]
        self.prefix_blocks = max(len(self.tokenizer.encode(prefix)) for prefix in self.prefixes) // BLOCK_SIZE

    def perfect(self) -> int:
        """Cached tokens if each group has one home that forgets nothing."""
        known: set[tuple[int, ...]] = set()
        total = 0
        for _, prompt in self.jobs:
            ids = self.tokenizer.encode(prompt)
            blocks = [tuple(ids[: end + BLOCK_SIZE]) for end in range(0, len(ids) - BLOCK_SIZE, BLOCK_SIZE)]
            total += BLOCK_SIZE * sum(block in known for block in blocks)
            known.update(blocks)
        return total


def main(argv: Sequence[str] | None = None) -> list[Outcome]:
    """Run the routers one after the other; print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", default=",".join(ROUTERS), help="names, with commas")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/prefix_routing"))
    options = parser.parse_args(argv)
    names = options.routers.split(",")
    if unknown := set(names) - set(ROUTERS):
        parser.error(f"unknown routers {sorted(unknown)}; known: {', '.join(ROUTERS)}")
    prompts = Prompts(options.seed)
    outcomes = []
    for name in names:
        outcomes.append(_run(name, prompts, options.concurrency))
        print(json.dumps(asdict(outcomes[-1])), file=sys.stderr, flush=True)
    table = markdown(outcomes)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table)
    print(table)
    return outcomes


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table."""
    lines = [
        "| router | cached / perfect | max/mean load | TTFT p50 / p90 / p99, ms | crowd: replicas, busiest's share "
        "| failed |",
        "|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        lines.append(
            f"| {o.router} | {o.cached_of_perfect:.1%} | {o.max_mean_load:.2f} | "
            f"{o.ttft_p50_ms:.0f} / {o.ttft_p90_ms:.0f} / {o.ttft_p99_ms:.0f} | "
            f"{o.hot_replicas}, {o.hot_home_share:.0%} | {o.failed} |"
        )
    return "\n".join(lines) + "\n"


def _run(router: str, prompts: Prompts, concurrency: int) -> Outcome:
    engine = {
        "model": MODEL,
        "num_blocks": (prompts.prefix_blocks + 1) * POOL_PREFIXES + IN_FLIGHT_BLOCKS * concurrency,
        "num_threads": 1,
    }
    with ServeProcess(CONFIG, edit=lambda config: _edit(config, router, engine), ready_timeout_s=400) as server:
        # A router hears of a replica a little after the first health check.
        asyncio.run(ask_all(server.base_url, [(-1, f"Warm {n}: {n * 7919}") for n in range(24)], 4))
        time.sleep(2.0)
        began = time.monotonic()
        answers = asyncio.run(ask_all(server.base_url, prompts.jobs, concurrency))
        wall_s = time.monotonic() - began
        crowd = asyncio.run(ask_all(server.base_url, prompts.crowd, 4 * concurrency))
        levels = _levels(server.base_url) if router in OURS else {}
    failed = len(prompts.jobs) + len(prompts.crowd) - len(answers) - len(crowd)
    return _outcome(router, answers, crowd, prompts.perfect(), wall_s, failed, levels)


def _levels(base_url: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for line in httpx.get(f"{base_url}/metrics", timeout=60).text.splitlines():
        if match := re.match(r'manta:ingress_routes_total\{.*level="(\w+)".*\} ([\d.e+]+)', line):
            found[match[1]] += int(float(match[2]))
    return dict(found)


def _edit(config: dict[str, Any], router: str, engine: dict[str, Any]) -> None:
    (application,) = config["applications"]
    if router in OURS:
        model = {"name": MODEL, "num_replicas": NUM_REPLICAS, "cpus_per_worker": 0, "replica_cpus": 0, "engine": engine}
        application["args"] = {"models": [model], "router": {"policy": router}, "ingress": PATIENCE}
        return
    application["import_path"] = "loadtest.plain_app:build"
    request_router = AFFINITY_ROUTER if router == "ray_prefix_affinity" else ""
    application["args"] = {"engine": engine, "num_replicas": NUM_REPLICAS, "request_router": request_router}


async def ask_all(
    base_url: str, jobs: Sequence[tuple[int, str]], concurrency: int, model_of: Callable[[int], str] = lambda _: MODEL
) -> list[Answer]:
    """Closed loop: `concurrency` clients take the jobs in order. A request that fails is told, and has no answer."""
    queue = list(reversed(jobs))
    answers: list[Answer] = []

    async def client(http: httpx.AsyncClient) -> None:
        while queue:
            group, prompt = queue.pop()
            try:
                answers.append(await _ask(http, group, prompt, model_of(group)))
            except (RuntimeError, httpx.HTTPError) as error:
                print(f"request failed: {error}", file=sys.stderr, flush=True)

    async with httpx.AsyncClient(base_url=base_url, timeout=300) as http:
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
    return answers


async def _ask(http: httpx.AsyncClient, group: int, prompt: str, model: str) -> Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    began, ttft_s, usage, replica, num_loads = time.perf_counter(), None, None, "", 0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        replica = response.headers.get("X-Manta-Replica", "")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(line)
            if ttft_s is None and chunk["choices"]:
                ttft_s = time.perf_counter() - began
            replica, num_loads = chunk.get("replica", replica), max(num_loads, chunk.get("num_loads", 0))
            usage = chunk.get("usage") or usage
    if ttft_s is None or usage is None:
        raise RuntimeError("the stream ended early")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(group, replica, ttft_s, usage["prompt_tokens"], details.get("cached_tokens") or 0, num_loads)


def _outcome(
    router: str,
    answers: list[Answer],
    crowd: list[Answer],
    perfect: int,
    wall_s: float,
    failed: int,
    levels: dict[str, int],
) -> Outcome:
    load = Counter(answer.replica for answer in answers)
    hot = Counter(answer.replica for answer in crowd)
    ttft = np.percentile([answer.ttft_s * 1e3 for answer in answers], [50, 90, 99])
    return Outcome(
        router=router,
        requests=len(answers),
        cached_of_perfect=sum(answer.cached_tokens for answer in answers) / perfect,
        max_mean_load=max(load.values()) * NUM_REPLICAS / len(answers),
        ttft_p50_ms=float(ttft[0]),
        ttft_p90_ms=float(ttft[1]),
        ttft_p99_ms=float(ttft[2]),
        wall_s=wall_s,
        hot_replicas=sum(count >= len(crowd) / 20 for count in hot.values()),
        hot_home_share=max(hot.values()) / len(crowd),
        failed=failed,
        levels=levels,
    )


if __name__ == "__main__":
    main()
