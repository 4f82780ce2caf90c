"""Routing policies side by side on simulated fleets, over the real policies, load book and prefix index.

    python -m loadtest.simulate --replicas 8,64 --pressure 0.4,0.75 --trace all --out results/sim

Writes OUT.json, OUT.md and OUT.html (tables and plots). `--quick` takes a quarter of the requests and three of the
traces. Everything but the CPU times is the same for the same seed. docs/routing.md says what is modelled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from app.backends import ROUTING_POLICIES
from loadtest.simulation.cell import Result, Setting, simulate
from loadtest.simulation.fleet import BASELINES
from loadtest.simulation.report import html_page, markdown
from loadtest.simulation.traces import TRACES

DEFAULT_POLICIES = (
    "round_robin",
    "power_of_two",
    "least_outstanding_tokens",
    "session_affinity",
    "approximate_tree",
    "prefix_aware",
)
QUICK_TRACES = ("shared_prefix", "agents", "documents")
QUICK_REQUESTS = 16  # per replica


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Run all cells, write the three files, print the table; the results in the order of the table."""
    options = _parse(argv)
    settings = [
        Setting(
            *(trace, replicas, pressure, policy, options.requests_per_replica, options.load, options.seed),
            adapter_places=options.adapter_places,
        )
        for trace, replicas, pressure, policy in itertools.product(
            options.trace, options.replicas, options.pressure, options.policies
        )
    ]
    began = time.monotonic()
    results = []
    with get_context("spawn").Pool(options.jobs) as pool:
        # The longest first, so that no process is left with one at the end.
        order = sorted(range(len(settings)), key=lambda i: -settings[i].num_replicas)
        for done, (at, result) in enumerate(pool.imap_unordered(_run, [(i, settings[i]) for i in order]), 1):
            results.append((at, result))
            cell = result.setting
            print(
                f"{done}/{len(settings)} {cell.trace} {cell.num_replicas} replicas {cell.pressure:g} {cell.policy}: "
                f"TTFT p90 {result.ttft_p90_s:.3f} s, hits {result.hit_rate:.0%}",
                *(f"({time.monotonic() - began:.0f} s)",),
                file=sys.stderr,
                flush=True,
            )
    ordered = [result for _, result in sorted(results, key=lambda pair: pair[0])]
    _write(options.out, ordered, "python -m loadtest.simulate " + " ".join(argv if argv is not None else sys.argv[1:]))
    print(markdown(ordered))
    return ordered


def _run(numbered: tuple[int, Setting]) -> tuple[int, Result]:
    return numbered[0], simulate(numbered[1])


def _write(out: Path, results: Sequence[Result], command: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    cells = [result.as_json() for result in results]
    out.with_suffix(".json").write_text(json.dumps({"command": command, "cells": cells}, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(results))
    out.with_suffix(".html").write_text(html_page(results, command))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=_counts, default=[8, 64], help="fleet sizes, as 8,64,256,1024")
    parser.add_argument("--pressure", type=_shares, default=[0.4, 0.75], help="KV demand / KV capacity, as 0.4,0.75")
    parser.add_argument("--trace", type=_traces, default=None, help=f"all, or some of {','.join(TRACES)}")
    parser.add_argument("--policies", type=_policies, default=list(DEFAULT_POLICIES), help="names, with commas")
    parser.add_argument("--requests-per-replica", type=int, default=None, help="64; with --quick 16")
    parser.add_argument("--load", type=float, default=0.9, help="1: all replicas busy if nothing is ever cached")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapter-places", type=int, default=0, help="adapters in a replica's memory; 0: all of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests per replica, fewer traces")
    parser.add_argument("--out", type=Path, default=Path("results/sim"), help="path without suffix")
    options = parser.parse_args(argv)
    if options.trace is None:
        options.trace = list(QUICK_TRACES if options.quick else TRACES)
    if options.requests_per_replica is None:
        options.requests_per_replica = QUICK_REQUESTS if options.quick else 64
    for name in ("requests_per_replica", "load", "jobs"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return options


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("a fleet has at least one replica")
    return counts


def _shares(text: str) -> list[float]:
    shares = [float(part) for part in text.split(",")]
    if min(shares) <= 0:
        raise argparse.ArgumentTypeError("a pressure is above 0")
    return shares


def _traces(text: str) -> list[str]:
    return _names(text, list(TRACES), "trace")


def _policies(text: str) -> list[str]:
    return _names(text, [*ROUTING_POLICIES, *BASELINES], "policy")


def _names(text: str, known: list[str], what: str) -> list[str]:
    if text == "all":
        return known
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return names


if __name__ == "__main__":
    main()
