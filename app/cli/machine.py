"""What the application may use: this machine, or the Ray cluster that `serve run` would join."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.cli.command import CommandError

PROBE_TIMEOUT_S = 5.0
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources in all. `gpu_memory_bytes` is the largest GPU's, None when unknown; of a cluster, memory is unknown."""

    name: str
    cpus: float
    gpus: float
    free_bytes: int | None
    gpu_memory_bytes: int | None
    is_cluster: bool = False


def find_machine() -> Machine:
    """The cluster that RAY_ADDRESS or a running `ray start` names, else this machine. CommandError: no such cluster."""
    address = os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        return _cluster(address)
    marker = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if address != "local" and marker.is_file():
        with contextlib.suppress(CommandError):  # left behind by a `ray start` that was killed: Ray starts anew too
            return _cluster(marker.read_text().strip())
    return this_machine()


def this_machine() -> Machine:
    """The resources of this machine."""
    gpus = _visible_gpus()
    memory = _gpu_memory_bytes() if gpus else None
    return Machine("this machine", float(os.cpu_count() or 1), float(gpus), _free_bytes(), memory)


def _cluster(address: str) -> Machine:
    _probe(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise CommandError(
            f"no Ray cluster answers at {address}: start one with `ray start --head`, or unset RAY_ADDRESS "
            f"({str(error).splitlines()[0]})"
        ) from None
    try:
        total = ray.cluster_resources()
    finally:
        ray.shutdown()
    return Machine(f"the Ray cluster at {address}", total.get("CPU", 0), total.get("GPU", 0), None, None, True)


def _probe(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise CommandError(
            f"no Ray cluster answers at {address} ({error.strerror or error}): start one with `ray start --head`, or "
            "unset RAY_ADDRESS"
        ) from None


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
