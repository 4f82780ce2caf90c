"""What the runs of a fault add up to: small enough to be committed, and all that the table needs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from loadtest.faults.judge import NEVER
from loadtest.faults.results import Run

_SHOWN = 5  # different lines of a kind


@dataclass(slots=True)
class Summary:
    """One fault. Durations in seconds; pairs are median and most, or p50 and p99."""

    runs: int = 0
    commits: list[str] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)  # streams by verdict (judge.Kind)
    probes: dict[str, int] = field(default_factory=dict)
    outage_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)  # p50, p99
    itl_p99_s: list[float] = field(default_factory=list)  # medians over the runs: before the strike, after it
    load: float = 0.0  # most
    leaks: int = 0
    findings: dict[str, int] = field(default_factory=dict)  # leaks too; numbers replaced by N
    errors: list[str] = field(default_factory=list)
    never: list[str] = field(default_factory=list)  # errors of kinds that never may be

    @property
    def streams(self) -> int:
        """All of them."""
        return sum(self.outcomes.values())


def of(runs: Sequence[Run]) -> Summary:
    """Add up the runs of one fault."""
    findings = [re.sub(r"\d+(\.\d+)?", "N", finding) for run in runs for finding in run.findings]
    errors = [error for run in runs for error in run.errors]
    befores, afters = [run.itl_p99_before_s for run in runs], [run.itl_p99_after_s for run in runs]
    return Summary(
        runs=len(runs),
        commits=sorted({run.commit for run in runs}),
        machines=sorted({run.machine for run in runs}),
        outcomes=_sum(run.outcomes for run in runs),
        probes=_sum(run.probes for run in runs),
        outage_s=_median_and_most([run.outage_s for run in runs]),
        whole_s=_median_and_most([run.whole_s for run in runs if run.whole_s is not None]),
        stalls_s=_p50_p99([stall for run in runs for stall in run.stalls_s]),
        itl_p99_s=[round(float(np.median(befores)), 4), round(float(np.median(afters)), 4)],
        load=max(run.load for run in runs),
        leaks=sum(finding.startswith("leak") for finding in findings),
        findings=dict(Counter(findings)),
        errors=list(dict.fromkeys(error for error in errors if not error.startswith(NEVER)))[:_SHOWN],
        never=[error for error in errors if error.startswith(NEVER) and ": probe: " not in error][:_SHOWN],
    )


def read(path: Path) -> dict[str, Summary]:
    """Summaries by fault; empty when there is no such file."""
    if not path.exists():
        return {}
    return {name: Summary(**fields) for name, fields in json.loads(path.read_text()).items()}


def write(path: Path, summaries: dict[str, Summary]) -> None:
    """One line a fault."""
    lines = [f"{json.dumps(name)}: {json.dumps(asdict(one))}" for name, one in sorted(summaries.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _median_and_most(values: Sequence[float]) -> list[float]:
    return [round(float(np.median(values)), 2), max(values)] if values else []


def _p50_p99(values: Sequence[float]) -> list[float]:
    return [round(float(np.percentile(values, part)), 4) for part in (50, 99)] if values else []
