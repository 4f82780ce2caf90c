"""What the machine does to a deployment: its clock jumps, its names cannot be resolved, its disk is full.

For the latter two the deployment has mounts of its own (own_mounts.py), so that nobody else on the machine is hit.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil

from loadtest.faults.fault import Fault, Strike
from loadtest.faults.shapes import OWN_CLOCK, OWN_MOUNTS
from loadtest.faults.site import Site

_LASTS_S = 10.0


def _jump(*offsets_s: int) -> Strike:
    async def strike(site: Site, rng: random.Random) -> list[str]:
        for offset_s in offsets_s:
            (site.tmp / "clock").write_text(str(offset_s))
            await asyncio.sleep(_LASTS_S / len(offsets_s))
        return []

    return strike


async def _set_clock(site: Site) -> None:
    (site.tmp / "clock").write_text("0")


async def _forget_names(site: Site, rng: random.Random) -> list[str]:
    """Nothing can be resolved, not even localhost."""
    for file in ("/etc/resolv.conf", "/etc/hosts"):
        await _in_mounts_of(site, "mount", "--bind", "/dev/null", file)
    await asyncio.sleep(_LASTS_S)
    return []


async def _know_names(site: Site) -> None:
    for file in ("/etc/resolv.conf", "/etc/hosts"):
        await _in_mounts_of(site, "umount", file)


async def _fill_disk(site: Site, rng: random.Random) -> list[str]:
    """The disk with Ray's sockets and logs takes not one byte more."""
    await _in_mounts_of(site, "dd", "if=/dev/zero", f"of={site.tmp}/ray/ballast", "bs=64k")
    await asyncio.sleep(_LASTS_S)
    return []


async def _free_disk(site: Site) -> None:
    await _in_mounts_of(site, "rm", "-f", f"{site.tmp}/ray/ballast")


async def _in_mounts_of(site: Site, *command: str) -> None:
    raylet = site.part("raylet")[0].pid
    process = await asyncio.create_subprocess_exec(
        "nsenter", f"--mount=/proc/{raylet}/ns/mnt", *command,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    await process.wait()  # dd ends with an error: the disk is full


def _no_compiler() -> str:
    return "" if shutil.which("cc") else "there is no C compiler to build clock_shim.c with"


def _not_root() -> str:
    return "" if os.geteuid() == 0 else "mounts of its own need root"


FAULTS = (
    Fault("clock_jump", 23, "the clock goes an hour forth, two back, and is set right", _jump(3600, -3600, 0),
          _set_clock, shape=OWN_CLOCK, keeps_on=True, obstacle=_no_compiler),
    Fault("dns_loss", 23, "no name can be resolved for 10 s", _forget_names, _know_names, shape=OWN_MOUNTS,
          keeps_on=True, obstacle=_not_root),
    Fault("disk_full", 23, "the disk of Ray's sockets and logs is full for 10 s", _fill_disk, _free_disk,
          shape=OWN_MOUNTS, keeps_on=True, obstacle=_not_root),
)  # fmt: skip
