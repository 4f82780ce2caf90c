"""SIGTERM as an event of a loop, whichever thread that runs in."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from app.deployments.process.termination import Termination
from tests import limits
from tests.limits import wait_until


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a handler of Python's own hears, as Ray's would."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def test_the_loop_hears_it_in_the_handlers_stead_until_it_is_closed(heard: list[int]) -> None:
    came, closed = threading.Event(), threading.Event()

    async def main() -> None:
        told = asyncio.Event()
        termination = Termination(told.set)
        ready.set()
        await told.wait()
        came.set()
        termination.close()
        termination.close()
        closed.set()

    ready = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(main()))  # Ray's event loops are not the main thread's
    thread.start()
    assert ready.wait(limits.patience_s())
    os.kill(os.getpid(), signal.SIGTERM)
    assert came.wait(limits.patience_s())
    assert heard == []
    assert closed.wait(limits.patience_s())
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: heard == [signal.SIGTERM], "the handler that was there before hears it again")
    thread.join(limits.patience_s())


def test_many_signals_fill_no_pipe(heard: list[int]) -> None:
    count = 0

    def note() -> None:
        nonlocal count
        count += 1

    async def main() -> None:
        termination = Termination(note)
        for _ in range(200):  # more than 64 KiB of tracebacks, while the loop reads nothing
            os.kill(os.getpid(), signal.SIGTERM)
        await limits.until(lambda: count > 0)
        termination.close()

    limits.run(main())
    assert heard == []
