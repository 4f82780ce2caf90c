"""Names of semaphores are taken away only where they are Ray's, and of semaphores that this process has open."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engine.executor.worker_group.semaphores import mapped_semaphores, unlink_semaphores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm and /proc are Linux's")
PID = os.getpid()


def open_semaphore(name: str) -> Path:
    """Create one as Ray does; where it lies."""
    sem_open = ctypes.CDLL(None).sem_open
    sem_open.restype = ctypes.c_void_p
    assert sem_open(f"/{name}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
    return Path(f"/dev/shm/sem.{name}")


@pytest.fixture
def foreign() -> Iterator[Path]:
    """Named as Ray's, but this process does not have it open."""
    path = Path(f"/dev/shm/sem.hdr{PID}-1")
    path.write_bytes(bytes(32))
    yield path
    path.unlink(missing_ok=True)


def test_only_names_of_graphs_that_this_process_has_open(foreign: Path) -> None:
    mine, pythons = [open_semaphore(f"{kind}{PID}-2") for kind in ("hdr", "obj")], open_semaphore(f"mp-{PID}")
    try:
        unlink_semaphores(mapped_semaphores())
        assert [path.exists() for path in (*mine, pythons, foreign)] == [False, False, True, True]
        unlink_semaphores(mapped_semaphores())  # nothing is left to do
    finally:
        pythons.unlink()


def test_graphs_that_were_there_before_keep_theirs() -> None:
    earlier = open_semaphore(f"obj{PID}-3")
    others = mapped_semaphores()
    later = open_semaphore(f"obj{PID}-4")
    unlink_semaphores(mapped_semaphores() - others)
    assert (earlier.exists(), later.exists()) == (True, False)
    unlink_semaphores(others)
    assert not earlier.exists()
