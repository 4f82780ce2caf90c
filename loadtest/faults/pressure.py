"""Memory that is full: the KV cache's, and that of a worker."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

from loadtest.faults.clients import flood
from loadtest.faults.fault import Fault
from loadtest.faults.mix import MODEL
from loadtest.faults.shapes import LITTLE_MEMORY
from loadtest.faults.site import Site

_CGROUPS = Path("/sys/fs/cgroup")
_MORE_BYTES = 4 << 10  # a page: a worker that has met all its shapes hardly takes more
_ENDS_S = 20.0
_LONG = {"model": MODEL, "prompt": [300 + number % 500 for number in range(600)], "max_tokens": 300, "stream": True}


async def _kv_exhausted(site: Site, rng: random.Random) -> list[str]:
    """Prompts that fill the KV cache and half of it again: all are answered, some after waiting."""
    replies = await flood(site, 24, {**_LONG, "ignore_eos": True, "temperature": 0})
    broken = [reply for reply in replies if not reply.answer.is_whole]
    return [f"{len(broken)} of {len(replies)} long requests were not answered"] if broken else []


async def _memory_exhausted(site: Site, rng: random.Random) -> list[str]:
    """A worker may take a few pages more and no further, so the kernel ends it within its next steps."""
    worker = rng.choice(site.part("worker"))
    group = site.notes["group"] = _limited_group()
    (group / "cgroup.procs").write_text(str(worker.pid))
    if not await site.until(lambda: not worker.is_running(), _ENDS_S):
        return ["the worker took no memory, so it did not run out of it"]
    return []


def _limited_group() -> Path:
    """A new memory cgroup, of version 1 or 2; only what its members take from now on counts."""
    is_old = (_CGROUPS / "memory").is_dir()
    if not is_old:
        (_CGROUPS / "cgroup.subtree_control").write_text("+memory")
    group = (_CGROUPS / "memory" if is_old else _CGROUPS) / f"manta-faults-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(_MORE_BYTES))
    return group


async def _free_memory(site: Site) -> None:
    with contextlib.suppress(OSError):
        site.notes["group"].rmdir()


def _no_cgroup() -> str:
    controllers = _CGROUPS / "cgroup.controllers"
    has_new = controllers.exists() and "memory" in controllers.read_text().split()
    place = _CGROUPS if has_new else _CGROUPS / "memory"
    return "" if os.access(place, os.W_OK) else "no memory cgroup may be made here"


FAULTS = (
    Fault("kv_exhausted", 17, "prompts for one and a half times the KV cache", _kv_exhausted, shape=LITTLE_MEMORY),
    Fault("memory_exhausted", 18, "a worker runs out of memory (cgroup)", _memory_exhausted, _free_memory,
          keeps_on=True, obstacle=_no_cgroup),
)  # fmt: skip
