"""Finds what the application may use: this machine, or the Ray cluster that `serve run` would join."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.cli.cluster import Cluster, cluster_address, probe

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources in all. `gpu_memory_bytes` is the largest GPU's, None when unknown; of a cluster, memory is unknown."""

    name: str
    cpus: float
    gpus: float
    free_bytes: int | None
    gpu_memory_bytes: int | None
    cluster: Cluster | None = None


def find_machine() -> Machine:
    """The cluster that RAY_ADDRESS or a running `ray start` names, else this machine. CommandError: it cannot be
    joined.
    """
    address = cluster_address()
    if address is None:
        return this_machine()
    cluster = probe(address)
    return Machine(f"the Ray cluster at {cluster.address}", cluster.cpus, cluster.gpus, None, None, cluster)


def this_machine() -> Machine:
    """The resources of this machine."""
    gpus = _visible_gpus()
    memory = _gpu_memory_bytes() if gpus else None
    return Machine("this machine", float(os.cpu_count() or 1), float(gpus), _free_bytes(), memory)


def _visible_gpus() -> int:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([each for each in chosen.split(",") if each.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _gpu_memory_bytes() -> int | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) << 20 for line in done.stdout.split() if line.isdigit()]
    return max(sizes, default=None)


def _free_bytes() -> int:
    """Memory that can still be had, within the container's limit."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = CGROUP_LIMIT.read_text().strip()
        used = int(CGROUP_LIMIT.with_name("memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(int(limit) - used, 0)) if limit.isdigit() else free
