"""Set-up that every test shares: no network, few threads, GPU tests only where there is a GPU."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # A core for each: threads of two processes that wait for the same cores take many times as long.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    os.environ["OMP_NUM_THREADS"] = "1"

# Before torch, Ray or transformers are imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # transformers imports Triton, and then it is too late to choose

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    """Leave with the tests' verdict, whatever native libraries do afterwards.

    `ray.shutdown` and `Cluster.shutdown` leave native threads running, which now and then crash the process while the
    destructors of static objects run. Ray's own processes leave like this too. Python's exit functions that were
    registered later run before this one.
    """

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(session.exitstatus)

    atexit.register(leave)


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs GPUs this machine has not got."""
    needs = {"gpu": 1, "multi_gpu": 2}
    marked = [(item, count) for item in items for name, count in needs.items() if item.get_closest_marker(name)]
    if not marked:
        return
    available = _gpu_count()
    for item, count in marked:
        if available < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} GPU(s), found {available}"))
