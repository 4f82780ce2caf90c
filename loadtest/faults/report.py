"""Writes the results' table into a page, between two marks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from loadtest.faults.fault import Fault
from loadtest.faults.judge import NEVER
from loadtest.faults.results import Run

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
_HEAD = (
    "| class | fault | runs | streams | error | lost | cut, wrong, hung | probes failed | outage, s | whole after, s "
    "| stall of moved streams, ms | ITL p99 of the others, ms | findings |"
)
_ERRORS = ("error", "unreadable")


def write(page: Path, faults: Sequence[Fault], runs: Sequence[Run], label: str, before: str) -> None:
    """Replace what is between the marks of `page`. ValueError when it has none."""
    text = page.read_text()
    head, found, rest = text.partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"{page} has no {BEGIN} ... {END} to write the table between")
    page.write_text(f"{head}{BEGIN}\n{table(faults, runs, label, before)}{END}{tail}")


def table(faults: Sequence[Fault], runs: Sequence[Run], label: str, before: str) -> str:
    """The table of the runs of `label`, then what is said of faults; errors of the runs of `before` in brackets."""
    lines = [_HEAD, "|" + "---|" * _HEAD.count(" | ") + "---|"]
    for fault in sorted(faults, key=lambda fault: fault.case):
        lines.append(_row(fault, _of(runs, fault, label), _of(runs, fault, before)))
    lines += ["", "Why some requests saw an error:", ""]
    harmed = [fault for fault in faults if _sum(_of(runs, fault, label), (*_ERRORS, "lost"))]
    lines += [f"- `{fault.name}`: {fault.why or 'they need not'}." for fault in harmed] or ["- none did"]
    lines += ["", "Leaks, and what else ought not to be:", ""]
    lines += [line for fault in faults for line in _findings(fault, _of(runs, fault, label))] or ["- none"]
    return "\n".join([*lines, ""])


def _findings(fault: Fault, runs: Sequence[Run]) -> list[str]:
    found = Counter(re.sub(r"\d+(\.\d+)?", "N", finding) for run in runs for finding in run.findings)
    wrong = [error for run in runs for error in run.errors if error.startswith(NEVER)]
    return [f"- `{fault.name}`: {what} ({count} times)" for what, count in found.items()] + [
        f"- `{fault.name}`: {error}" for error in wrong
    ]


def _of(runs: Sequence[Run], fault: Fault, label: str) -> list[Run]:
    return [run for run in runs if run.fault == fault.name and run.commit == label]


def _row(fault: Fault, runs: list[Run], before: list[Run]) -> str:
    name = f"| {fault.case} | `{fault.name}`: {fault.what} "
    if not runs:
        reason = f"cannot run here: {fault.obstacle()}" if fault.obstacle() else "not run"
        return f"{name}| {reason}{_before(before, (*_ERRORS, 'lost'))} |" + " |" * 10
    stalls = [1e3 * stall for run in runs for stall in run.stalls_s]
    cells = [
        str(len(runs)),
        str(sum(sum(run.outcomes.values()) for run in runs)),
        f"{_sum(runs, _ERRORS)}{_before(before, _ERRORS)}",
        f"{_sum(runs, ('lost',))}{_before(before, ('lost',))}",
        f"{', '.join(str(_sum(runs, (kind,))) for kind in NEVER)}{_before(before, NEVER)}",
        f"{_failed(runs)} of {sum(sum(run.probes.values()) for run in runs)}",
        _median_and_most([run.outage_s for run in runs], 1),
        _median_and_most([run.whole_s for run in runs if run.whole_s is not None], 1),
        _percentiles(stalls),
        f"{_median(runs, lambda run: run.itl_p99_before_s)} -> {_median(runs, lambda run: run.itl_p99_after_s)}",
        str(sum(len(run.findings) for run in runs)),
    ]
    return name + "| " + " | ".join(cells) + " |"


def _sum(runs: Sequence[Run], kinds: Sequence[str]) -> int:
    return sum(run.outcomes.get(kind, 0) for run in runs for kind in kinds)


def _before(runs: Sequence[Run], kinds: Sequence[str]) -> str:
    """What it was, as a share of the streams."""
    if not runs:
        return ""
    return f" (before: {_sum(runs, kinds)} of {sum(sum(run.outcomes.values()) for run in runs)})"


def _failed(runs: Sequence[Run]) -> int:
    return sum(count for run in runs for kind, count in run.probes.items() if kind != "ok")


def _median(runs: Sequence[Run], of: Callable[[Run], float]) -> str:
    return f"{1e3 * float(np.median([of(run) for run in runs])):.0f}"


def _median_and_most(values: Sequence[float], digits: int) -> str:
    return f"{np.median(values):.{digits}f}, at most {max(values):.{digits}f}" if values else "-"


def _percentiles(values: Sequence[float]) -> str:
    return f"{np.percentile(values, 50):.0f} / {np.percentile(values, 99):.0f}" if values else "-"
