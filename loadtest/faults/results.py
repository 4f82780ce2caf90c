"""The runs, a JSON line each, appended as they end: a series is taken up where it was stopped."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serve_process import ROOT


@dataclass(slots=True)
class Run:
    """One run of one fault. Durations in seconds."""

    fault: str
    outcomes: dict[str, int]  # streams by verdict (judge.Kind)
    probes: dict[str, int]  # the prober's requests by verdict
    errors: list[str]  # some of them, in words
    outage_s: float  # from the first failed probe to the last one's end
    served_s: float | None  # from the strike to the first failed probe; None: none failed
    probe_max_s: float
    whole_s: float | None  # from the strike until every part was there again; None: never
    stalls_s: list[float]  # the longest gap of each stream whose replica went, and that ended well
    longest_gap_s: float  # of the others, after the strike
    itl_p99_before_s: float
    itl_p99_after_s: float  # of the others
    findings: list[str]  # what ought not to be: leaks, parts that did not come back
    load: float  # of the machine, over the last minute
    seed: int = 0
    seconds: float = 0.0  # that the run took
    commit: str = ""
    machine: str = field(default_factory=lambda: machine())
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def commit() -> str:
    """The commit of what is run, with a `+` when app/ is changed since."""
    short = subprocess.run(
        ["git", "rev-parse", "--short=9", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "app"], cwd=ROOT).returncode
    return short + ("+" if changed else "")


def machine() -> str:
    """What counts of the machine for times."""
    return f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"


def append(path: Path, run: Run) -> None:
    """Add one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")


def read(path: Path) -> list[Run]:
    """All runs; what an interrupted line left is dropped."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [Run(**fields) for fields in lines]
