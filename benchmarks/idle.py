"""The quickstart with nothing to do: CPU, memory and wake-ups of each of its processes.

    python -m benchmarks.idle [--seconds 60] [--rounds 2] [--set NAME=VALUE ...] [--threads] [--out results/idle.json]

Each round starts the server twice, one after the other: as `serve run` does, and as `manta serve` does (settings of
app/cli/ray_settings.py, no dashboard); `--set` adds to the latter. CPU is that of all processes over the seconds, PSS
counts shared pages once, a wake-up is a voluntary switch of a thread.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from app.cli.ray_settings import RAY_SETTINGS
from benchmarks.offline import write
from benchmarks.serve_process import ROOT, ServeProcess

SETTLE_S = 30.0
MIB = 1 << 20


def name_of(process: psutil.Process) -> str:
    """A short name of what a process does; those of one kind share it."""
    words = " ".join(process.cmdline())
    if found := re.match(r"(ray::[\w:.]+|ray-dashboard-\w+|IDLE)", words):
        return re.sub(r"-\d+$", "", found.group(1))
    for part in ("gcs_server", "raylet/raylet", "dashboard/agent.py", "runtime_env/agent", "dashboard/dashboard.py",
                 "log_monitor", "autoscaler", "haproxy", "forkserver", "resource_tracker", "deployment"):  # fmt: skip
        if part in words:
            return part
    return words[:60] or process.name()


def switches(pid: int) -> dict[str, int]:
    """Voluntary switches of each thread of a process so far, by id and name."""
    found = {}
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):
            text = status.read_text()
            number = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE)
            name = re.search(r"^Name:\s+(.*)", text, re.MULTILINE)
            if number and name:
                found[f"{status.parent.name} {name.group(1)}"] = int(number.group(1))
    return found


class Side(NamedTuple):
    """One way to start the server."""

    module: tuple[str, ...]
    environ: Mapping[str, str]


class Sample:
    """Figures of all processes of a server at one time."""

    def __init__(self, server: ServeProcess) -> None:
        self.cpu: dict[int, float] = {}
        self.names: dict[int, str] = {}
        self.threads: dict[int, dict[str, int]] = {}
        self.pss: dict[int, float] = {}
        self.at_s = time.monotonic()
        for process in server.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self.names[process.pid] = name_of(process)
                self.cpu[process.pid] = times.user + times.system
                self.threads[process.pid] = switches(process.pid)
                self.pss[process.pid] = process.memory_full_info().pss / MIB


def measure(side: Side, seconds: float, with_threads: bool) -> dict[str, Any]:
    """One start: figures by the names of processes, those of most CPU first."""
    config = ROOT / "configs/serve/quickstart.yaml"
    with ServeProcess(config, module=side.module, environ=side.environ) as server:
        time.sleep(SETTLE_S)
        begin = Sample(server)
        time.sleep(seconds)
        end = Sample(server)
    passed_s = end.at_s - begin.at_s
    cpu, pss, wakes, threads = (defaultdict[str, float](float) for _ in range(4))
    count = Counter(end.names.values())
    for pid, name in end.names.items():
        pss[name] += end.pss[pid]
        cpu[name] += (end.cpu[pid] - begin.cpu.get(pid, 0.0)) / passed_s
        for thread, number in end.threads[pid].items():
            rate = (number - begin.threads.get(pid, {}).get(thread, 0)) / passed_s
            wakes[name] += rate
            threads[f"{name} / {thread.partition(' ')[2]}"] += rate
    rows = [
        {"name": name, "processes": count[name], "cpu_percent": round(100 * used, 2),
         "pss_mib": round(pss[name]), "wakes_per_s": round(wakes[name])}
        for name, used in _largest(cpu)
    ]  # fmt: skip
    whole = {
        "cpu_percent": round(100 * sum(cpu.values()), 1),
        "pss_mib": round(sum(pss.values())),
        "wakes_per_s": round(sum(wakes.values())),
        "processes": sum(count.values()),
        "start_s": round(server.start_time_s, 1),
    }
    most = {name: round(rate) for name, rate in _largest(threads)[:40]} if with_threads else {}
    return {"whole": whole, "by_process": rows, "by_thread": most}


def _largest(figures: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(figures.items(), key=lambda pair: -pair[1])


def main() -> None:
    """Measure both by turns, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a further setting")
    parser.add_argument("--only", choices=["serve run", "manta serve"], help="leave the other one out")
    parser.add_argument("--threads", action="store_true", help="also wake-ups by thread")
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    further = dict(pair.split("=", 1) for pair in args.set)
    sides = {
        "serve run": Side(("ray.serve.scripts", "run"), {}),
        "manta serve": Side(("app.cli.deployment",), {**RAY_SETTINGS, **further}),
    }
    figures: dict[str, list[Any]] = {side: [] for side in sides if args.only in (None, side)}
    for _ in range(args.rounds):
        for side in figures:
            found = measure(sides[side], args.seconds, args.threads)
            figures[side].append(found)
            print(side, found["whole"], flush=True)
            for row in found["by_process"]:
                print("   ", row, flush=True)
            for name, rate in found["by_thread"].items():
                print("   ", f"{rate:6d} {name}", flush=True)
    write(args.out, figures)


if __name__ == "__main__":
    main()
