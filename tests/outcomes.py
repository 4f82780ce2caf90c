"""What became of each test of a run, as JSON: `pytest --outcomes FILE` (`make acceptance` keeps its grids so)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def outcomes_of(stats: Mapping[str, Iterable[Any]]) -> dict[str, dict[str, Any]]:
    """pytest's reports by outcome -> by file: how many had each outcome, all seconds, and each case's outcome."""
    files: dict[str, dict[str, Any]] = {}
    for reports in stats.values():
        for report in reports:
            if getattr(report, "nodeid", "") and hasattr(report, "duration"):
                _take(files, report)
    for found in files.values():
        cases = list(found["cases"].values())
        found["counts"] = {outcome: cases.count(outcome) for outcome in sorted(set(cases))}
        found["seconds"] = round(found["seconds"], 2)
    return files


def _take(files: dict[str, dict[str, Any]], report: Any) -> None:
    """A test has up to three reports: one that failed says what it is, else the call, or the skip before it."""
    file, _, case = report.nodeid.partition("::")
    found = files.setdefault(file, {"counts": {}, "seconds": 0.0, "cases": {}})
    found["seconds"] += report.duration
    says = report.outcome != "passed" or report.when == "call"
    if says and found["cases"].get(case) != "failed":
        found["cases"][case] = report.outcome
