"""`python -m loadtest.faults.relay`: a link between this network namespace and a new one, bad on command.

Both ends are TUN devices, and every packet between them passes through here, where it may be lost, kept back or
counted against a bandwidth. A line of JSON on standard input says how bad the link is from now on (`Link`); the first
line on standard output says that it is up. The new namespace is that of this process, so `nsenter` enters it by its id.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

HERE, THERE = "10.77.0.1", "10.77.0.2"  # of namespaces that nothing leads out of
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x1, 0x1000, 0x40000000
_PACKET_BYTES = 65536


@dataclass(slots=True)
class Link:
    """How bad it is. `loss`: the share of packets that vanish; `one_way`: only those to the new namespace."""

    loss: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: no limit
    one_way: bool = False


class Direction:
    """From one device to the other."""

    def __init__(self, source: int, target: int, is_there: bool) -> None:
        self.source = source
        self._target = target
        self._is_there = is_there
        self._waiting: list[tuple[float, int, bytes]] = []  # when to hand it on, a number, the packet
        self._count = 0
        self._free_at = 0.0  # when the wire has sent all so far

    def take(self, link: Link, rng: random.Random) -> None:
        """Read one packet, and lose it or queue it."""
        packet = os.read(self.source, _PACKET_BYTES)
        is_bad = self._is_there or not link.one_way
        if is_bad and rng.random() < link.loss:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + (len(packet) / link.bytes_per_s if link.bytes_per_s else 0.0)
        self._count += 1
        heapq.heappush(self._waiting, (self._free_at + (link.delay_s if is_bad else 0.0), self._count, packet))

    def hand_on(self) -> float | None:
        """Write what is due; seconds until the next is, None when nothing waits."""
        while self._waiting:
            if (left := self._waiting[0][0] - time.monotonic()) > 0:
                return left
            os.write(self._target, heapq.heappop(self._waiting)[2])
        return None


def main() -> None:
    """Ends with its standard input."""
    here = _tun("faults-a", HERE)
    enter_new_network()
    there = _tun("faults-b", THERE)
    print("up", flush=True)
    _relay((Direction(here, there, True), Direction(there, here, False)))


def enter_new_network() -> None:
    """A network namespace for this process, with its own loopback and nothing else. OSError where that is forbidden."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace of its own")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def _relay(directions: tuple[Direction, Direction]) -> None:
    link, rng = Link(), random.Random(0)
    with selectors.DefaultSelector() as selector:
        for direction in directions:
            selector.register(direction.source, selectors.EVENT_READ, direction)
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        while True:
            waits = [wait for direction in directions if (wait := direction.hand_on()) is not None]
            for key, _ in selector.select(min(waits, default=None)):
                if key.data is not None:
                    key.data.take(link, rng)
                elif line := sys.stdin.readline():
                    link = Link(**json.loads(line))
                else:
                    return


def _tun(name: str, address: str) -> int:
    """A device of the current namespace, as a file that gives and takes its packets."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "address", "add", f"{address}/24", "dev", name], check=True)
    subprocess.run(["ip", "link", "set", name, "up"], check=True)
    return device


if __name__ == "__main__":
    main()
