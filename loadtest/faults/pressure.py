"""Memory that is full: the KV cache's, and that of a worker."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import psutil

from loadtest.faults.clients import flood
from loadtest.faults.fault import Fault
from loadtest.faults.mix import MODEL
from loadtest.faults.shapes import LITTLE_MEMORY
from loadtest.faults.site import Site

_CGROUP = Path("/sys/fs/cgroup/memory")
_LONG = {"model": MODEL, "prompt": [300 + number % 500 for number in range(600)], "max_tokens": 300, "stream": True}


async def _kv_exhausted(site: Site, rng: random.Random) -> list[str]:
    """Prompts that fill the KV cache and half of it again: all are answered, some after waiting."""
    replies = await flood(site, 24, {**_LONG, "ignore_eos": True, "temperature": 0})
    broken = [reply for reply in replies if not reply.answer.is_whole]
    return [f"{len(broken)} of {len(replies)} long requests were not answered"] if broken else []


async def _memory_exhausted(site: Site, rng: random.Random) -> list[str]:
    """A worker gets less memory than it has, so the kernel ends it when it next touches a page."""
    worker = rng.choice(site.part("worker"))
    group = _CGROUP / f"manta-faults-{os.getpid()}"
    group.mkdir(exist_ok=True)
    site.notes["group"] = group
    (group / "cgroup.procs").write_text(str(worker.pid))
    (group / "memory.move_charge_at_immigrate").write_text("1")
    limit = max(worker.memory_info().rss // 4, 16 << 20)
    with contextlib.suppress(OSError):  # it cannot give back so much: from now on it may take no more
        (group / "memory.limit_in_bytes").write_text(str(limit))
    with contextlib.suppress(psutil.NoSuchProcess):
        if not await site.until(lambda: not worker.is_running(), 10.0):
            worker.kill()  # a worker that is content with what it has
    return []


async def _free_memory(site: Site) -> None:
    with contextlib.suppress(OSError):
        site.notes["group"].rmdir()


def _no_cgroup() -> str:
    return "" if os.access(_CGROUP, os.W_OK) else "no memory cgroup may be made here"


FAULTS = (
    Fault("kv_exhausted", 17, "prompts for one and a half times the KV cache", _kv_exhausted, shape=LITTLE_MEMORY),
    Fault("memory_exhausted", 18, "a worker runs out of memory (cgroup)", _memory_exhausted, _free_memory,
          obstacle=_no_cgroup),
)  # fmt: skip
