"""The clients of a run: streams of every kind, and a prober who asks something short again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from loadtest.faults.judge import Verdict, judge
from loadtest.faults.mix import Ask, probe
from loadtest.faults.reply import Reply, send

PROBE_EVERY_S = 0.25
PROBE_LIMIT_S = 20.0


class Goldens:
    """The answers of undisturbed requests."""

    def __init__(self, replies: Mapping[str, Reply], *, is_exact: bool = False) -> None:
        self._replies, self._is_exact = replies, is_exact
        self.size = sum(reply.answer.size() for reply in replies.values())

    @classmethod
    async def record(cls, base_url: str, asks: Sequence[Ask], limit_s: float, *, is_exact: bool = False) -> Goldens:
        """Ask everything at once, with nobody else there. RuntimeError when an answer is not whole. `is_exact`: others
        are held against these to the bit."""
        async with client(base_url) as http:
            replies = [Reply(ask) for ask in [*asks, probe()]]
            await asyncio.gather(*(send(http, reply, limit_s) for reply in replies))
        for reply in replies:
            if not reply.answer.is_whole or reply.answer.faults:
                what = reply.refusal or reply.broke or reply.answer.error or reply.answer.faults or reply.end
                raise RuntimeError(f"{reply.ask.name} fails without any fault: {what}")
        return cls({reply.ask.name: reply for reply in replies}, is_exact=is_exact)

    def judge(self, reply: Reply) -> Verdict:
        """The reply's verdict."""
        return judge(reply, self._replies[reply.ask.name].answer, is_exact=self._is_exact)


@dataclass(slots=True)
class Traffic:
    """`async with Traffic(...) as traffic:` begins it; `finish` waits for the streams; the prober goes on to the end.

    Every stream is asked for once, and again and again while `keeps_on`.
    """

    base_url: str
    asks: Sequence[Ask]
    limit_s: float
    keeps_on: bool = False
    replies: list[Reply] = field(default_factory=list)
    probes: list[Reply] = field(default_factory=list)
    _streams: list[asyncio.Task[None]] = field(default_factory=list)
    _prober: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Traffic:
        self._streams = [asyncio.create_task(self._stream(ask)) for ask in self.asks]
        self._prober = asyncio.create_task(self._probe())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keeps_on = False
        for task in [*self._streams, self._prober]:
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._streams, self._prober or asyncio.sleep(0), return_exceptions=True)

    async def reach(self, size: float) -> None:
        """Wait until the streams have brought so much (Answer.size), or have ended."""
        while True:
            if sum(reply.answer.size() for reply in self.replies) >= size or all(task.done() for task in self._streams):
                return
            await asyncio.sleep(0.005)

    async def finish(self) -> None:
        """Ask nothing further, and wait until every stream has ended or is hung."""
        self.keeps_on = False
        await asyncio.gather(*self._streams)

    async def _stream(self, ask: Ask) -> None:
        async with client(self.base_url) as http:
            while True:
                reply = Reply(ask)
                self.replies.append(reply)
                await send(http, reply, self.limit_s)
                if not self.keeps_on:
                    return
                await asyncio.sleep(0.1 if reply.answer.is_whole else 1.0)

    async def _probe(self) -> None:
        async with client(self.base_url) as http:
            while True:
                reply = Reply(probe())
                await send(http, reply, PROBE_LIMIT_S)
                self.probes.append(reply)
                await asyncio.sleep(PROBE_EVERY_S)


def client(base_url: str) -> httpx.AsyncClient:
    """One that opens a connection for each request, as somebody who has just come, and waits as long as it takes."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False, verify=False)
