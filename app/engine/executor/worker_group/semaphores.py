"""The named semaphores of a Ray compiled graph, whose names Ray leaves in /dev/shm, even after a clean teardown.

A semaphore lives on in the processes that have mapped it, as an open file does; only who comes later needs its name.
So once both ends of every channel have opened it, the names may go, and no death leaks anything from then on.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Set
from pathlib import Path

_DIRECTORY = Path("/dev/shm").resolve()
_MAPS = Path("/proc/self/maps")
_NAME = re.compile(r"sem\.(hdr|obj)\d+-\d+")  # two a channel's buffer; Python's own are sem.mp-*

Inode = tuple[int, int]  # device, number


def mapped_semaphores() -> Set[Inode]:
    """Named semaphores that this process has open; none where the system is not Linux.

    By inode, as the process that made a semaphore has mapped it under a temporary name.
    """
    try:
        lines = _MAPS.read_text().splitlines()
    except FileNotFoundError:
        return set()
    found: set[Inode] = set()
    for line in lines:  # addresses, permissions, offset, device, inode, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{_DIRECTORY}/sem."):
            major, minor = fields[3].split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return found


def unlink_semaphores(ours: Set[Inode]) -> None:
    """Take the names of these, as far as they are a graph's, out of /dev/shm."""
    if not ours:
        return
    for path in _DIRECTORY.iterdir():
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):  # the other end was faster, or another user owns it
                status = path.stat()
                if (status.st_dev, status.st_ino) in ours:
                    path.unlink()
