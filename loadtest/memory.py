"""Memory of a server's processes, and sizes of the structures that it counts itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import psutil

MIB = 1 << 20
_LINE = re.compile(r"^(Rss|Pss):\s+(\d+) kB$", re.MULTILINE)
# Gauges that count something kept or held, as they stand on /metrics.
COUNTED = (
    "manta:ingress_requests", "manta:ingress_sockets", "manta:ingress_held_bytes", "manta:ingress_stored_entries",
    "manta:ingress_stored_bytes", "manta:router_index_blocks", "manta:router_speculative_blocks",
    "vllm:num_requests_running", "vllm:num_requests_waiting",
)  # fmt: skip
_SAMPLE = re.compile(r"^([a-z_]+:[a-z_]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_OWN_LABELS = re.compile(r'(?:ingress|router|engine|model_name)="[^"]*",?')


def of_processes(processes: Iterable[psutil.Process]) -> dict[str, dict[str, float]]:
    """RSS and PSS in MiB by the name of the process; those of one name together."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"rss": 0.0, "pss": 0.0})
    for process in processes:
        try:
            name, text = _name(process), Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (psutil.Error, OSError):  # it has ended
            continue
        for kind, kib in _LINE.findall(text):
            found[name][kind.lower()] += int(kib) / 1024
    return dict(found)


def _name(process: psutil.Process) -> str:
    """A Ray process by what it runs; others by their programs."""
    command = process.cmdline()
    if not command:
        return process.name()
    if command[0].startswith("ray::"):
        return command[0].split(".")[0]
    return Path(command[0]).name


def of_structures(page: str) -> dict[str, float]:
    """The counted structures on a page of metrics, summed up over replicas."""
    found: dict[str, float] = defaultdict(float)
    for name, labels, value in _SAMPLE.findall(page):
        if name in COUNTED:
            rest = _OWN_LABELS.sub("", labels).rstrip(",")
            found[f"{name}{{{rest}}}" if rest else name] += float(value)
    return dict(found)
