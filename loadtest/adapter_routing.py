"""Real engine replicas of the built-in model with many adapters, behind different routers, through HTTP.

    python -m loadtest.adapter_routing --out results/adapter_routing

Four replicas, each with room for ten of forty adapters in memory, of which four may be in a step; requests choose
adapters by Zipf's law. Routers: ours with the policies prefix_aware and power_of_two, where the other adapters lie on
disk (max_disk_loras), and Serve's multiplexed models over the bare engine (loadtest/plain_app.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from app.checkpoints.model_info import ASSETS
from benchmarks.serve_process import ServeProcess
from loadtest.plain_app import MOST_MODELS
from loadtest.prefix_routing import CONFIG, MODEL, NUM_REPLICAS, PATIENCE, Answer, ask_all
from loadtest.prompts import sentences

NUM_ADAPTERS = 40
SLOTS = 4
OURS = ("prefix_aware", "power_of_two")
ROUTERS = (*OURS, "serve_multiplexing")
SOURCE = "tiny-chat-pirate"


@dataclass(slots=True, frozen=True)
class Outcome:
    """One router's figures."""

    router: str
    requests: int
    failed: int
    loads: float  # of adapters from disk, by all replicas
    replicas_each: float  # that served an adapter, by requests
    max_mean_load: float  # requests of the busiest replica / mean
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    wall_s: float
    load_average: float  # of the machine, at the end


def main(argv: Sequence[str] | None = None) -> list[Outcome]:
    """Run the routers one after the other; print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", default=",".join(ROUTERS), help="names, with commas")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/adapter_routing"))
    options = parser.parse_args(argv)
    names = options.routers.split(",")
    if unknown := set(names) - set(ROUTERS):
        parser.error(f"unknown routers {sorted(unknown)}; known: {', '.join(ROUTERS)}")
    jobs, outcomes = zipf_jobs(options.requests, options.seed), []
    root = Path(tempfile.mkdtemp(prefix="manta-adapters-"))
    try:
        adapters = {f"adapter-{number}": str(_write(root / str(number), number)) for number in range(NUM_ADAPTERS)}
        for name in names:
            outcomes.append(_run(name, adapters, jobs, options.concurrency))
            print(json.dumps(asdict(outcomes[-1])), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(root)
    table = markdown(outcomes)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    options.out.with_suffix(".md").write_text(table)
    print(table)
    return outcomes


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table."""
    lines = [
        "| router | loads | replicas of an adapter | max/mean load | TTFT p50 / p90 / p99, ms | failed |",
        "|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        lines.append(
            f"| {o.router} | {o.loads:.0f} | {o.replicas_each:.1f} | {o.max_mean_load:.2f} | "
            f"{o.ttft_p50_ms:.0f} / {o.ttft_p90_ms:.0f} / {o.ttft_p99_ms:.0f} | {o.failed} |"
        )
    return "\n".join(lines) + "\n"


def zipf_jobs(count: int, seed: int) -> list[tuple[int, str]]:
    """Requests as (adapter, prompt): the popularity of the adapters falls as 1 / rank."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(NUM_ADAPTERS)]
    chosen = rng.choices(range(NUM_ADAPTERS), weights, k=count)
    return [(adapter, f"{n} for {adapter}: {sentences(rng, 30)}") for n, adapter in enumerate(chosen)]


def _write(directory: Path, seed: int) -> Path:
    """An adapter of the built-in model like the one that comes with it, and unlike any other."""
    shutil.copytree(ASSETS / SOURCE, directory)
    weights = directory / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (tensor.float() * (1 + 0.1 * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in load_file(weights).items()
    }
    save_file(tensors, weights)
    return directory


def _run(router: str, adapters: dict[str, str], jobs: list[tuple[int, str]], concurrency: int) -> Outcome:
    names = list(adapters)
    with ServeProcess(CONFIG, edit=lambda config: _edit(config, router, adapters), ready_timeout_s=400) as server:
        # A router hears of a replica a little after the first health check.
        warm = [(n % NUM_ADAPTERS, f"Warm {n}: {n * 7919}") for n in range(24)]
        first = asyncio.run(ask_all(server.base_url, warm, 4, names.__getitem__))
        time.sleep(2.0)
        before = _loads(server.base_url, router, first)
        began = time.monotonic()
        answers = asyncio.run(ask_all(server.base_url, jobs, concurrency, names.__getitem__))
        wall_s = time.monotonic() - began
        loads = _loads(server.base_url, router, [*first, *answers]) - before
    of_replica = Counter(answer.replica for answer in answers)
    served = Counter(adapter for adapter, _ in {(answer.group, answer.replica) for answer in answers})
    ttft = np.percentile([answer.ttft_s * 1e3 for answer in answers], [50, 90, 99])
    return Outcome(
        router=router,
        requests=len(answers),
        failed=len(jobs) - len(answers),
        loads=loads,
        replicas_each=sum(served[answer.group] for answer in answers) / len(answers),
        max_mean_load=max(of_replica.values()) * NUM_REPLICAS / len(answers),
        ttft_p50_ms=float(ttft[0]),
        ttft_p90_ms=float(ttft[1]),
        ttft_p99_ms=float(ttft[2]),
        wall_s=wall_s,
        load_average=os.getloadavg()[0],
    )


def _loads(base_url: str, router: str, answers: Sequence[Answer]) -> float:
    """Loads of all replicas so far: by our metrics, or by what the plain engines told with their answers."""
    if router not in OURS:
        latest: dict[str, int] = {}
        for answer in answers:
            latest[answer.replica] = max(latest.get(answer.replica, 0), answer.num_loads)
        return sum(latest.values())
    text = httpx.get(f"{base_url}/metrics", timeout=60).text
    return sum(float(match[1]) for match in re.finditer(r"(?m)^manta:adapter_reads_total\{.*\} ([\d.e+]+)$", text))


def _edit(config: dict[str, Any], router: str, adapters: dict[str, str]) -> None:
    (application,) = config["applications"]
    engine = {
        "model": MODEL,
        "num_blocks": 2000,
        "num_threads": 1,
        "enable_lora": True,
        "max_loras": SLOTS,
        "max_cpu_loras": MOST_MODELS,
    }
    if router in OURS:
        engine |= {"max_disk_loras": NUM_ADAPTERS - MOST_MODELS}
        model = {"name": MODEL, "num_replicas": NUM_REPLICAS, "cpus_per_worker": 0, "replica_cpus": 0}
        model |= {"engine": engine, "adapters": adapters}
        application["args"] = {"models": [model], "router": {"policy": router}, "ingress": PATIENCE}
        return
    application["import_path"] = "loadtest.plain_app:build"
    engine["max_cpu_loras"] = 2 * MOST_MODELS  # Serve drops one after it has loaded the next
    application["args"] = {"engine": engine, "num_replicas": NUM_REPLICAS, "adapters": adapters}


if __name__ == "__main__":
    main()
