"""A lean client for the streams of any OpenAI-compatible server, which times their events.

aiohttp speaks HTTP, one connection a request; msgspec reads only the fields that are used, so that on a small machine
the client is not what is measured. Times are those of vLLM's client: one event for each chunk that carries a choice.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from app.errors import ConfigError

TIMEOUT_S = 6 * 3600.0
CUT = "the server closed the connection before the answer had ended"
LINE_LIMIT = 16 << 20  # bytes of one SSE line


class Delta(msgspec.Struct):
    """Holds what a chat chunk adds to its message."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class StreamChoice(msgspec.Struct):
    """One choice of a chunk."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class StreamUsage(msgspec.Struct):
    """The tokens of the whole request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    """One SSE event of a completion or chat completion."""

    choices: list[StreamChoice] | None = None
    usage: StreamUsage | None = None
    error: Any = None


@dataclass(slots=True)
class StreamResult:
    """One streamed answer; times are of `time.perf_counter`, `begin` is just before the request was sent."""

    begin: float
    event_times: list[float] = field(default_factory=list)  # one for each event with a choice
    num_tokens: int = 0  # from the usage chunk; 0 when the server sent none
    num_prompt_tokens: int = 0  # the same
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.event_times[0] - self.begin if self.event_times else float("nan")

    @property
    def e2e_s(self) -> float:
        """Time to last token."""
        return self.event_times[-1] - self.begin if self.event_times else float("nan")

    @property
    def itls_s(self) -> list[float]:
        """Time between each event and the next."""
        return [b - a for a, b in zip(self.event_times, self.event_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Server:
    """Names where an OpenAI-compatible server answers: `url` is what comes before /v1."""

    url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url {self.url!r}: expected something like http://127.0.0.1:8000")

    @property
    def base(self) -> str:
        """`url` without a trailing slash or /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    def headers(self) -> dict[str, str]:
        """Returns the headers that every request carries."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}


async def stream_completion(
    server: Server, body: dict[str, Any], path: str = "/v1/completions", on_chunk: Callable[[Chunk], None] | None = None
) -> StreamResult:
    """POST `body` with stream and usage on, and time each event. A failure is in the result, never raised."""
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    result = StreamResult(time.perf_counter())
    try:
        await _exchange(server, path, payload, result, on_chunk)
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
        result.error = CUT
    except aiohttp.ClientConnectorError as error:
        result.error = f"{type(error.os_error).__name__}: {error.os_error}"
    except (OSError, ValueError, aiohttp.ClientError, msgspec.MsgspecError) as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


async def run_streams(
    server: Server, bodies: Sequence[dict[str, Any]], concurrency: int, path: str = "/v1/completions"
) -> list[StreamResult]:
    """Stream all `bodies`, at most `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> StreamResult:
        async with gate:
            return await stream_completion(server, body, path)

    return list(await asyncio.gather(*(one(body) for body in bodies)))


async def _exchange(
    server: Server, path: str, payload: bytes, result: StreamResult, on_chunk: Callable[[Chunk], None] | None
) -> None:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, read_bufsize=LINE_LIMIT) as session,
        session.post(server.base + path, data=payload, headers=server.headers()) as answer,
    ):
        if answer.status != HTTPStatus.OK:
            result.error = f"{answer.status} {answer.reason}: {reason_of(await answer.read())}"
            return
        await _read_events(answer.content, result, on_chunk)


async def _read_events(
    lines: AsyncIterable[bytes], result: StreamResult, on_chunk: Callable[[Chunk], None] | None
) -> None:
    decoder = msgspec.json.Decoder(Chunk)
    async for line in lines:
        if not line.startswith(b"data:"):
            continue  # comments, event names, blank lines
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        chunk = decoder.decode(data)
        if chunk.error is not None:
            result.error = reason_of(data)
            return
        if chunk.choices:
            result.event_times.append(time.perf_counter())
            first = chunk.choices[0]
            result.text += first.text or (first.delta.content if first.delta else None) or ""
        if chunk.usage is not None:
            result.num_tokens = chunk.usage.completion_tokens or 0
            result.num_prompt_tokens = chunk.usage.prompt_tokens or 0
        if on_chunk is not None:
            on_chunk(chunk)
    else:
        result.error = "the stream ended without [DONE]"
        return
    if not result.event_times:
        result.error = "the answer held no token"


def reason_of(body: bytes) -> str:
    """The message of an error body in OpenAI's shape, or its beginning."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body[:500].decode(errors="replace").strip()
