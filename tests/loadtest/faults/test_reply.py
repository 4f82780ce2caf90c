"""What a hang is: silence, not length."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from loadtest.faults.mix import COMPLETIONS, Ask
from loadtest.faults.reply import End, Reply, send

LIMIT_S = 120.0


class Clock:
    """The running loop's time, ahead of the real one by what the test says."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ahead_s, self._time = 0.0, loop.time
        loop.time = lambda: self._time() + self.ahead_s  # type: ignore[method-assign]

    async def passes(self, seconds: float) -> None:
        """Timers that are due by then have their turn."""
        self.ahead_s += seconds
        for _ in range(3):
            await asyncio.sleep(0)


async def _events(clock: Clock, pauses_s: list[float]) -> AsyncIterator[bytes]:
    for pause_s in pauses_s:
        await clock.passes(pause_s)
        yield b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'


@pytest.mark.parametrize(("pauses_s", "end"), [([60.0] * 5, "end"), ([60.0, 60.0, 121.0, 60.0], "hung")])
def test_a_stream_that_goes_on_is_not_hung_however_long_it_takes(pauses_s: list[float], end: End) -> None:
    async def ask() -> Reply:
        clock = Clock()
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=_events(clock, pauses_s)))
        reply = Reply(Ask("a stream", COMPLETIONS, {"prompt": "a", "stream": True}))
        async with httpx.AsyncClient(base_url="http://server", transport=transport, timeout=None) as http:
            await send(http, reply, LIMIT_S)
        return reply

    assert asyncio.run(ask()).end == end
