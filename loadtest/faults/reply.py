"""Sends one request as a client would, and notes what comes back and when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import httpx

from loadtest.faults.answer import Answer, reader_of
from loadtest.faults.mix import MODEL, Ask

End = Literal["end", "lost", "hung"]  # of the body: as HTTP has it; the connection broke; nothing more came


@dataclass(slots=True)
class Reply:
    """One request's outcome. Times are of time.monotonic(), in seconds; `times` those of the events."""

    ask: Ask
    began: float = 0.0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    answer: Answer = field(default_factory=Answer)
    end: End = "end"
    ended: float = 0.0
    refusal: str = ""  # the body of a status that is not 200
    broke: str = ""  # the client library's words

    @property
    def replica(self) -> str:
        """The engine replica that began the answer; empty when none did."""
        return self.headers.get("x-manta-replica", "")

    def gaps(self, since: float = 0.0, until: float = float("inf")) -> list[float]:
        """Seconds between neighbouring events, of the gaps that ended between the two moments."""
        return [later - earlier for earlier, later in pairwise(self.times) if since < later < until]


async def send(http: httpx.AsyncClient, reply: Reply, limit_s: float) -> None:
    """Ask, and fill the reply as it comes, however it ends; `limit_s` without anything new is a hang."""
    reply.began = time.monotonic()
    try:
        async with asyncio.timeout(limit_s) as silence:
            await _read(http, reply, silence, limit_s)
    except TimeoutError:
        reply.end = "hung"
    except httpx.HTTPError as error:
        reply.end, reply.broke = "lost", f"{type(error).__name__}: {error}"
    reply.ended = time.monotonic()


async def _read(http: httpx.AsyncClient, reply: Reply, silence: asyncio.Timeout, limit_s: float) -> None:
    body: dict[str, Any] = {"model": MODEL, **reply.ask.body}
    async with http.stream("POST", reply.ask.path, json=body) as response:
        reply.status, reply.headers = response.status_code, dict(response.headers)
        if response.status_code != 200:
            reply.refusal = (await response.aread()).decode(errors="replace")
            return
        reader = reader_of(reply.ask)
        async for data in _data(response, bool(body.get("stream"))):
            reply.times.append(time.monotonic())
            silence.reschedule(asyncio.get_running_loop().time() + limit_s)
            try:
                reader.push(reply.answer, data)
            except (ValueError, LookupError, TypeError) as error:
                reply.answer.faults.append(f"not an event of {reply.ask.path} ({error!r}): {data[:200]}")


async def _data(response: httpx.Response, stream: bool) -> AsyncIterator[str]:
    """The data of each server-sent event; of an answer that is no stream its body."""
    if not stream:
        yield (await response.aread()).decode()
        return
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line[5:].strip()


def is_readable(refusal: str) -> bool:
    """Whether a refusal is an error object as the SDKs read it."""
    try:
        return bool(json.loads(refusal)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return False
