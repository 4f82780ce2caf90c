"""Three times as many requests as can be served, half of them from one tenant: who is served, and in time?

    python -m loadtest.overload --out results/overload                    # simulated, in seconds
    python -m loadtest.overload --served --out results/overload_served    # a real deployment over modelled devices

Simulated devices and clients around the real admission and schedulers; or all real but the devices. Prints one table
and writes OUT.json; the peak is the best goodput (tokens a second of requests that ended within their deadline) of the
loads around 1. docs/admission.md says what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.overload_served import run_served
from loadtest.simulation.fairness import Outcome
from loadtest.simulation.overload import OverloadedFleet, Setting

LOADS = (0.8, 1.0, 1.2)  # from which the peak is taken
OVERLOAD = 3.0
FIRST_PART = 1 / 6  # of a run, in which queues fill
_HEAD = ("load", "hostile", "queue", "sent", "let in", "in time", "goodput, tok/s", "of the peak", "Jain")


def simulated(length_s: float, seed: int) -> list[dict[str, Any]]:
    """The peak's loads, the overload with more or less of it hostile, and the same without any of this."""
    calm = [Setting(load, hostile_share=0.2, length_s=length_s, seed=seed) for load in LOADS]
    hostile = [Setting(OVERLOAD, hostile_share=share, length_s=length_s, seed=seed) for share in (0.2, 0.5, 0.8)]
    bare = Setting(OVERLOAD, hostile_share=0.5, length_s=length_s, seed=seed, is_guarded=False)
    return [_simulated(setting) for setting in (*calm, *hostile, bare)]


def _simulated(setting: Setting) -> dict[str, Any]:
    requests = OverloadedFleet(setting).run()
    outcome = Outcome.of(requests, setting.deadline_s, FIRST_PART * setting.length_s, setting.length_s)
    return asdict(setting) | outcome.as_json()


def served(length_s: float, deadline_s: float, seed: int) -> list[dict[str, Any]]:
    """The loads around 1, then the overload, half and four fifths of it hostile."""
    cases = ((1.0, 0.2), (1.2, 0.2), (OVERLOAD, 0.5), (OVERLOAD, 0.8))
    return asyncio.run(run_served(cases, length_s, deadline_s, seed))


def with_peak(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its goodput as a share of the best of the loads around 1."""
    peak = max(row["goodput"] for row in rows if row["load"] in LOADS)
    return [row | {"of_peak": row["goodput"] / peak} for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for row in rows:
        cells = (
            *(f"{row['load']:g}", f"{row['hostile_share']:.0%}", "fair" if row["is_guarded"] else "FCFS, no refusals"),
            *(f"{row['num_requests']:,}", f"{row['num_admitted']:,}", f"{row['in_time']:.1%}"),
            *(f"{row['goodput']:,.0f}", f"{row['of_peak']:.3f}", f"{row['jain']:.3f}"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, write, print; the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--served", action="store_true", help="against real processes; takes five times --length")
    parser.add_argument("--deadline", type=float, default=15.0, help="of --served, in seconds")
    parser.add_argument("--length", type=float, default=60.0, help="seconds of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/overload"), help="path without suffix")
    options = parser.parse_args(argv)
    length, seed = options.length, options.seed
    rows = with_peak(served(length, options.deadline, seed) if options.served else simulated(length, seed))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    command = "python -m loadtest.overload " + " ".join(argv if argv is not None else sys.argv[1:])
    options.out.with_suffix(".json").write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
