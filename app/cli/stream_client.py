"""A lean SSE client on raw asyncio streams, so that on a small machine the client is not what is measured.

It speaks just enough HTTP/1.1 (one request a connection; chunked, sized or closed bodies) to time streamed answers of
any OpenAI-compatible server. Times are those of vLLM's client: one event for each chunk that carries a choice.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from app.errors import ConfigError

TIMEOUT_S = 6 * 3600.0
CUT = "the server closed the connection before the answer had ended"
LINE_LIMIT = 16 << 20  # bytes of one SSE line


class Delta(msgspec.Struct):
    """What a chat chunk adds to its message."""

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
    """Where an OpenAI-compatible server answers: `url` is what comes before /v1."""

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
        """What every request carries."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}


async def stream_completion(
    server: Server, body: dict[str, Any], path: str = "/v1/completions", on_chunk: Callable[[Chunk], None] | None = None
) -> StreamResult:
    """POST `body` with stream and usage on, and time each event. A failure is in the result, never raised."""
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    result = StreamResult(time.perf_counter())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _exchange(server, path, payload, result, on_chunk)
    except EOFError:
        result.error = CUT
    except (OSError, ValueError, asyncio.LimitOverrunError, msgspec.MsgspecError) as error:
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
    parts = urlsplit(server.base)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=LINE_LIMIT)
    try:
        lines = [f"POST {parts.path}{path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in server.headers().items()]
        lines.append(f"Content-Length: {len(payload)}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
        status, chunked = await _read_head(reader)
        if " 200" not in status:
            body = b"\n".join([line async for line in _lines(reader, chunked)])
            result.error = f"{status.partition(' ')[2]}: {_reason(body)}"
            return
        await _read_events(_lines(reader, chunked), result, on_chunk)
    finally:
        writer.close()


async def _read_events(
    lines: AsyncIterator[bytes], result: StreamResult, on_chunk: Callable[[Chunk], None] | None
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
            result.error = _reason(data)
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


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, bool]:
    """Status line, and whether the body is chunked."""
    status = (await reader.readline()).decode("latin-1").strip()
    if not status:
        raise EOFError(CUT)
    chunked = False
    while line := (await reader.readline()).strip().lower():
        chunked = chunked or (line.startswith(b"transfer-encoding:") and b"chunked" in line)
    return status, chunked


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """Lines of the body without their ends. A body that breaks off raises EOFError."""
    if not chunked:
        async for line in reader:
            yield line.rstrip(b"\r\n")
        return
    rest = b""
    while size := await _chunk_size(reader):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError(CUT)
    return int(line.partition(b";")[0], 16)


def _reason(body: bytes) -> str:
    """The message of an error body in OpenAI's shape, or its beginning."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body[:500].decode(errors="replace").strip()
