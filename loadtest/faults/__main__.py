"""Strike a real deployment with faults and judge every stream.

    python -m loadtest.faults --runs 20                            # all faults, going on where a stopped series was
    python -m loadtest.faults engine_killed worker_killed --runs 3 --label before
    python -m loadtest.faults --list
    python -m loadtest.faults --report docs/reliability.md         # write the table from the results

Runs are counted by commit, or by --label where one is given. A deployment is started for each shape that the faults
need, and kept from run to run as long as it becomes whole again.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from loadtest.faults import report, results, runner
from loadtest.faults.fault import Fault
from loadtest.faults.mix import mixed
from loadtest.faults.nodes import enter_own_network
from loadtest.faults.shapes import Shape
from loadtest.faults.site import Site
from loadtest.faults.table import FAULTS
from loadtest.faults.traffic import Goldens

GOLDEN_S = 300.0


class Series:
    """Runs of several faults, the deployment kept from one to the next where it can be."""

    def __init__(self, out: Path, label: str, num_tokens: int) -> None:
        self._out = out
        self._label = label
        self._asks = mixed(num_tokens)
        self._stack = ExitStack()
        self._site: Site | None = None
        self._goldens: Goldens | None = None

    def __enter__(self) -> Series:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def run(self, fault: Fault, seed: int) -> results.Run:
        """One run, appended to the results."""
        site, goldens = self._open(fault.shape)
        try:
            outcome = asyncio.run(runner.run(fault, site, goldens, self._asks, seed))
        except BaseException:
            self._close()
            raise
        outcome.commit = self._label
        results.append(self._out, outcome)
        if fault.ends_site or outcome.whole_s is None:
            self._close()
        return outcome

    def _open(self, shape: Shape) -> tuple[Site, Goldens]:
        if self._site is None or self._goldens is None or self._site.shape is not shape:
            self._close()
            self._site = self._stack.enter_context(Site(shape))
            try:
                self._goldens = asyncio.run(Goldens.record(self._site.base_url, self._asks, GOLDEN_S))
            except RuntimeError as error:
                raise RuntimeError(f"{error}\n{self._site.log()[-4000:]}") from error
        return self._site, self._goldens

    def _close(self) -> None:
        self._site = self._goldens = None
        self._stack.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 1 when something happened that never may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="names of --list; all of them when none is given")
    parser.add_argument("--runs", type=int, default=1, help="runs of each fault that the results shall hold")
    parser.add_argument("--tokens", type=int, default=300, help="length of the streams, where it is free")
    parser.add_argument("--label", default="", help="count runs under this name instead of the commit")
    parser.add_argument("--out", type=Path, default=Path("results/faults.jsonl"))
    parser.add_argument("--list", action="store_true", help="the faults")
    parser.add_argument("--report", type=Path, metavar="PAGE", help="only write the results' table into this page")
    parser.add_argument("--before", default="before", help="with --report: the label of the runs to compare with")
    options = parser.parse_args(argv)
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"unknown faults {sorted(unknown)}; --list names them")
    chosen = [FAULTS[name] for name in options.faults or FAULTS]
    if options.list:
        for fault in chosen:
            print(f"{fault.case:2}  {fault.name:30} {fault.what}{' - ' * bool(fault.obstacle())}{fault.obstacle()}")
        return 0
    label = options.label or results.commit()
    if options.report:
        report.write(options.report, chosen, results.read(options.out), label, options.before)
        return 0
    enter_own_network()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and the deployment with it
    with Series(options.out, label, options.tokens) as series:
        return _run_all(series, chosen, label, options.runs, options.out)


def _run_all(series: Series, chosen: Sequence[Fault], label: str, num_runs: int, out: Path) -> int:
    """Faults in the order of their shapes, so that a deployment is started once."""
    bad = 0
    for fault in sorted(chosen, key=lambda fault: fault.shape.name):
        if fault.obstacle():
            print(f"{fault.name}: cannot run here: {fault.obstacle()}", file=sys.stderr)
            continue
        done = sum(run.fault == fault.name and run.commit == label for run in results.read(out))
        for seed in range(done, num_runs):
            run = series.run(fault, seed)
            print(f"{fault.name} {seed}: {run.outcomes}, probes {run.probes}, whole after {run.whole_s} s", flush=True)
            for line in [*run.findings, *run.errors]:
                print(f"    {line}", flush=True)
            bad += bool(run.findings) or any(run.outcomes.get(kind, 0) for kind in ("cut", "wrong", "hung"))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
