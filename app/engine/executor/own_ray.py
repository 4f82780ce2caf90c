"""Starts a Ray cluster for a process that is in none, and tells whose worker processes wait behind others."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress

logger = logging.getLogger("manta.executor")

# In the environment of a cluster that is ours alone; what is there already stays.
SETTINGS = {
    # Ray runs workers at nice 15, where any other process of the machine starves them.
    "RAY_worker_niceness": "0",
    # Ray starts a worker for every core at once; none of ours fits them, and they take the time of those that do.
    "RAY_prestart_worker_first_driver": "0",
    # Or each Ctrl-C would end with an error: Serve's controller ends itself, and Ray reports the call that asked it to.
    "RAY_enable_output_error_log_if_still_retry": "0",
}


def start() -> None:
    """Start one, or join that of RAY_ADDRESS."""
    import ray  # not with the settings, which a command reads that has none

    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init(include_dashboard=False)


def warn_of_niceness(pids: Iterable[int]) -> None:
    """Warn where one of these processes of this machine waits behind any other: a cluster that is joined has its own
    settings."""
    niceness = 0
    for pid in pids:
        with suppress(ProcessLookupError):  # in a container of its own, or gone already
            niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, pid))
    if niceness > 0:
        logger.warning(
            "the workers run at nice %d, behind other processes of this machine: start Ray with RAY_worker_niceness=0",
            niceness,
        )
