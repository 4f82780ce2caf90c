"""The named semaphores of Ray's compiled graphs: a worker group that runs or ended, however it ended, leaves none."""

from __future__ import annotations

import re
from pathlib import Path

from tests import limits

_SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"sem\.(hdr|obj)\d+-\d+")
_OTHERS_START_S = 5.0  # a graph of another test has names until its first step was answered


def graph_semaphores() -> set[str]:
    """Their names now."""
    return {path.name for path in _SHARED_MEMORY.iterdir() if _NAME.fullmatch(path.name)}


def left_semaphores(before: set[str]) -> set[str]:
    """Names that came since `before` and stay."""
    limit = limits.Limit(_OTHERS_START_S)
    left = graph_semaphores() - before
    while left and limit.left_s():
        limits.pause(0.05)
        left &= graph_semaphores()
    return left
