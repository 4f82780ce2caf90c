"""Strike a real deployment with faults and judge every stream.

    python -m loadtest.faults --runs 20 --jobs 4                   # all faults, going on where a stopped series was
    python -m loadtest.faults engine_killed worker_killed --runs 3 --label before
    python -m loadtest.faults --list
    python -m loadtest.faults --report docs/reliability.md         # write the table from the results

Runs are counted by commit, or by --label where one is given. A deployment is started for each shape that the faults
need, and kept from run to run as long as it becomes whole again. Each of the `--jobs` has a network (as root), a Ray
cluster and a directory of its own, so one's faults do not reach another; give each about two cores. Results of several
machines join by appending their files.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.faults import report, results
from loadtest.faults.fault import Fault
from loadtest.faults.jobs import Jobs
from loadtest.faults.judge import NEVER
from loadtest.faults.plan import Plan, Task
from loadtest.faults.results import Run
from loadtest.faults.table import FAULTS


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 when something happened that never may, or a run could not be made."""
    parser = _parser()
    options = parser.parse_args(argv)
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"unknown faults {sorted(unknown)}; --list names them")
    if min(options.runs, options.jobs, options.tokens) < 1:
        parser.error("--runs, --jobs and --tokens are at least 1")
    chosen = [FAULTS[name] for name in options.faults or FAULTS]
    if options.list:
        for fault in chosen:
            print(f"{fault.case:2}  {fault.name:30} {fault.what}{' - ' * bool(fault.obstacle())}{fault.obstacle()}")
        return 0
    label = options.label or results.commit()
    if options.report:
        report.write(options.report, chosen, results.read(options.out), options.of or [label])
        return 0
    return _run_all(chosen, label, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names of --list; all of them when none is given")
    parser.add_argument("--runs", type=int, default=1, help="runs of each fault that the results shall hold")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--tokens", type=int, default=300, help="length of the streams, where it is free")
    parser.add_argument("--label", default="", help="count runs under this name instead of the commit")
    parser.add_argument("--out", type=Path, default=Path("results/faults.jsonl"))
    parser.add_argument("--list", action="store_true", help="the faults")
    parser.add_argument("--report", type=Path, metavar="PAGE", help="only write the results' table into this page")
    parser.add_argument("--of", nargs="+", metavar="COMMIT", help="with --report: the commits or labels that count")
    return parser


def _run_all(chosen: Sequence[Fault], label: str, options: argparse.Namespace) -> int:
    for fault in chosen:
        if fault.obstacle():
            print(f"{fault.name}: cannot run here: {fault.obstacle()}", file=sys.stderr)
    possible = [fault for fault in chosen if not fault.obstacle()]
    plan = Plan(possible, [run for run in results.read(options.out) if run.commit == label], options.runs)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and the jobs with it
    bad = 0
    with Jobs(min(options.jobs, len(plan)), label, options.tokens) as jobs:
        for task, outcome in jobs.run(plan):
            if isinstance(outcome, Run):
                results.append(options.out, outcome)
            bad += _show(task, outcome)
    return int(bad > 0)


def _show(task: Task, outcome: Run | str) -> bool:
    """Print it; whether it is bad."""
    name = f"{task.fault.name} {task.seed}"
    if isinstance(outcome, str):
        print(f"{name}: not made: {outcome}", flush=True)
        return True
    print(f"{name}: {outcome.outcomes}, probes {outcome.probes}, whole after {outcome.whole_s} s", flush=True)
    for line in [*outcome.findings, *outcome.errors]:
        print(f"    {line}", flush=True)
    return bool(outcome.findings) or any(outcome.outcomes.get(kind, 0) for kind in NEVER)


if __name__ == "__main__":
    sys.exit(main())
