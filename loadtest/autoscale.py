"""Autoscaling policies side by side on simulated fleets: what share of the requests is in time, and for how many
replica-hours.

    python -m loadtest.autoscale --out results/autoscale

Writes OUT.json and OUT.md. Manta's policy and Ray Serve's run as they are installed; docs/autoscaling.md says what is
modelled. The same for the same seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import starmap
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from app.config.autoscaling import AutoscalingConfig
from app.deployments.autoscaling.policy import Settings
from loadtest.simulation.arrivals import RATES, create_load
from loadtest.simulation.scaled_fleet import ScaledFleet
from loadtest.simulation.scalers import Ours, QueueRule, Scaler, Schedule, ServeDefault
from loadtest.simulation.speeds import H200_DECODE_MS, Speeds
from loadtest.simulation.traffic import Trace

SLOWER = 5  # times than 8B on an H200, so that few requests fill a replica: the larger model's are as many hours
_H200 = Speeds()
SPEEDS = Speeds(
    token_s=SLOWER * _H200.token_s,
    pair_s=SLOWER * _H200.pair_s,
    resident_token_s=SLOWER * _H200.resident_token_s,
    decode_ms=tuple((num, SLOWER * ms) for num, ms in H200_DECODE_MS),
)
NUM_BLOCKS = 2048  # of 128 tokens
MAX_REPLICAS = 10
MOST_PER_S = 6.0  # requests at the peak
LENGTH_S = 1800.0
COLD_START_S = 45.0
TTFT_S, ITL_S = 4.0, 0.15
ENOUGH = 0.99  # attainment that the oracle has to reach, or else as much as it can
ORACLE_LOADS = (0.7, 1.0, 1.3)  # requests per second and replica that its schedules plan with
ORACLE_WINDOW_S = 60
"""A schedule holds for whole windows, as replicas that would come and go within seconds are none that anybody has."""


_DEFAULTS = ("utilization", "hysteresis", "up_delay_s", "down_interval_s", "down_delay_s", "idle_s")


@dataclass(slots=True, frozen=True)
class Result:
    """One trace under one policy. Shares of all requests; a replica's hours begin when it is asked for."""

    trace: str
    policy: str
    num_requests: int
    attained: float  # both in time
    ttft_attained: float
    itl_attained: float
    ttft_p50_s: float
    ttft_p99_s: float
    replica_hours: float
    most_replicas: int
    num_scalings: int
    num_turns: int
    num_moved: int  # requests whose replica went


def settings(min_replicas: int) -> Settings:
    """Manta's policy with its defaults, but for the objectives of the modelled service."""
    defaults = AutoscalingConfig(min_replicas=min_replicas, max_replicas=MAX_REPLICAS)
    return Settings(
        min_replicas=min_replicas, max_replicas=MAX_REPLICAS, ttft_slo_s=TTFT_S, itl_slo_s=ITL_S, max_num_seqs=128,
        **{name: getattr(defaults, name) for name in _DEFAULTS},
    )  # fmt: skip


POLICIES: dict[str, Callable[[int], tuple[Scaler, int]]] = {
    # name -> (fewest replicas) -> the scaler and what it starts with
    "Manta": lambda least: (Ours(settings(least), COLD_START_S), max(least, 1)),
    "Serve, defaults": lambda least: (ServeDefault(min_replicas=least, max_replicas=MAX_REPLICAS), max(least, 1)),
    "Serve, target 16": lambda least: (
        ServeDefault(min_replicas=least, max_replicas=MAX_REPLICAS, target_ongoing_requests=16),
        max(least, 1),
    ),
    "queue rule (KEDA)": lambda least: (QueueRule(least, MAX_REPLICAS, threshold=5), max(least, 1)),
    "fixed 3": lambda least: (Schedule([3]), 3),
    "fixed 6": lambda least: (Schedule([6]), 6),
}


def simulate(trace_name: str, policy: str, seed: int, length_s: float = LENGTH_S) -> Result:
    """One row of the table; KeyError for unknown names."""
    trace = create_load(trace_name, MOST_PER_S, length_s, seed)
    if policy == "oracle":
        return _oracle(trace_name, seed, length_s)
    scaler, start = POLICIES[policy](0 if trace_name == "on_off" else 1)
    return _run(trace, policy, scaler, start, length_s, seed)


def _run(trace: Trace, policy: str, scaler: Scaler, start: int, length_s: float, seed: int) -> Result:
    fleet = ScaledFleet(scaler, start, COLD_START_S, NUM_BLOCKS, SPEEDS, seed)
    fleet.run(trace, length_s)
    requests = list(trace)
    ttft = np.array([r.first_token_s - r.sent_s for r in requests])
    itl = np.array([(r.ended_s - r.first_token_s) / max(1, r.num_output_tokens - 1) for r in requests])
    return Result(
        trace=trace.name,
        policy=policy,
        num_requests=len(requests),
        attained=float(((ttft <= TTFT_S) & (itl <= ITL_S)).mean()),
        ttft_attained=float((ttft <= TTFT_S).mean()),
        itl_attained=float((itl <= ITL_S).mean()),
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p99_s=float(np.percentile(ttft, 99)),
        replica_hours=fleet.replica_s / 3600,
        most_replicas=fleet.most,
        num_scalings=fleet.num_scalings,
        num_turns=fleet.num_turns,
        num_moved=fleet.num_replaced,
    )


def _oracle(trace_name: str, seed: int, length_s: float) -> Result:
    """The cheapest that attains ENOUGH of schedules that know all arrivals and ask a cold start ahead, or the best."""
    results = []
    for load in ORACLE_LOADS:
        trace = create_load(trace_name, MOST_PER_S, length_s, seed)
        numbers = _schedule(trace, length_s, load, 0 if trace_name == "on_off" else 1)
        results.append(_run(trace, "oracle", Schedule(numbers), numbers[0], length_s, seed))
    enough = [result for result in results if result.attained >= ENOUGH]
    if enough:
        return min(enough, key=lambda result: result.replica_hours)
    return max(results, key=lambda result: result.attained)


def _schedule(trace: Trace, length_s: float, load: float, least: int) -> list[int]:
    windows = np.zeros(int(length_s // ORACLE_WINDOW_S) + 2)
    for request in trace.roots:
        windows[int((1.0 + request.at * length_s) // ORACLE_WINDOW_S)] += 1
    numbers = [max(least, min(MAX_REPLICAS, int(np.ceil(n / ORACLE_WINDOW_S / load)))) for n in windows]
    by_second = [number for number in numbers for _ in range(ORACLE_WINDOW_S)]
    ahead = int(COLD_START_S) + 1
    seconds = range(len(by_second))
    return [max(by_second[at : at + ahead + 1]) for at in seconds]


def markdown(results: Sequence[Result]) -> str:
    """One table."""
    head = (
        *("trace", "policy", "in time", "TTFT", "ITL", "TTFT p50, s", "p99", "replica-hours", "most"),
        *("changes", "turns", "requests moved"),
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for one in results:
        cells = (
            *(one.trace, one.policy, *(f"{x:.1%}" for x in (one.attained, one.ttft_attained, one.itl_attained))),
            *(f"{one.ttft_p50_s:.2f}", f"{one.ttft_p99_s:.1f}", f"{one.replica_hours:.2f}", str(one.most_replicas)),
            *(str(one.num_scalings), str(one.num_turns), str(one.num_moved)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _all(cells: Sequence[tuple[str, str, int, float]], jobs: int) -> Iterator[Result]:
    if jobs == 1:
        yield from starmap(simulate, cells)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(simulate, *zip(*cells, strict=True))


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Run all cells, write both files, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", choices=RATES, nargs="*", default=list(RATES))
    parser.add_argument("--policy", choices=[*POLICIES, "oracle"], nargs="*", default=[*POLICIES, "oracle"])
    parser.add_argument("--length-s", type=float, default=LENGTH_S, help="seconds of each trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=Path("results/autoscale"), help="path without suffix")
    options = parser.parse_args(argv)
    cells = [(trace, policy, options.seed, options.length_s) for trace in options.trace for policy in options.policy]
    results = []
    for result in _all(cells, options.jobs):
        results.append(result)
        print(f"{result.trace} {result.policy}: {result.attained:.1%}", file=sys.stderr, flush=True)
    command = "python -m loadtest.autoscale " + " ".join(argv if argv is not None else sys.argv[1:])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    whole = {"command": command.strip(), "cells": [asdict(result) for result in results]}
    options.out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))
    return results


if __name__ == "__main__":
    main()
