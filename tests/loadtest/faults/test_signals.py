"""Strikes that wait for what they struck, over a process that takes its time to end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from loadtest.faults import signals

_LINGERS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: {handler})
print("up", flush=True)
time.sleep(60)
"""


class OnePart:
    """A Site of one process."""

    def __init__(self, handler: str) -> None:
        command = [sys.executable, "-c", _LINGERS.format(handler=handler)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"
        self.notes: dict[str, Any] = {}

    def part(self, name: str) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid)]

    async def until(self, condition: Callable[[], Any], limit_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, limit_s)
        return bool(condition())


@pytest.fixture
def linger(request: pytest.FixtureRequest) -> Iterator[OnePart]:
    site = OnePart(request.param)
    yield site
    site.process.kill()
    site.process.wait()


def strike(site: OnePart, limit_s: float) -> list[str]:
    ending = signals.until_gone(signals.send(signals.signal.SIGTERM, "engine"), limit_s)
    return asyncio.run(ending(site, random.Random(0)))  # type: ignore[arg-type]


@pytest.mark.parametrize("linger", ["(time.sleep(0.3), sys.exit())"], indirect=True)
def test_an_ended_process_is_waited_for(linger: OnePart) -> None:
    assert strike(linger, 60.0) == []
    assert linger.process.returncode == 0


@pytest.mark.parametrize("linger", ["None"], indirect=True)
def test_a_process_that_does_not_end_is_a_finding(linger: OnePart) -> None:
    assert strike(linger, 0.2) == ["what was to end was still there after 0 s"]


def test_each_sigterm_waits() -> None:
    ended = [fault for fault in signals.FAULTS if fault.name.endswith("_ended")]
    assert {fault.strike.__name__ for fault in ended} == {"strike_and_wait"}
    assert len(ended) == 3
