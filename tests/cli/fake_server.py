"""An OpenAI-compatible server whose answers come at times that a test wrote down, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tests import limits


@dataclass
class Script:
    """One streamed answer: an event after each of `gaps_s`, then usage."""

    gaps_s: Sequence[float]
    num_tokens: int = 0  # in usage; 0: no usage at all
    num_prompt_tokens: int = 0
    texts: Sequence[str] = ()
    ending: str = "done"  # or "cut", "error", "status"


@dataclass
class Seen:
    """One request as the server met it; times of time.perf_counter."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    arrived: float
    sent: list[float] = field(default_factory=list)
    closed_early: threading.Event = field(default_factory=threading.Event)


class FakeServer:
    """`with FakeServer(scripts) as server:` answers the n-th completion by the n-th script, all others by the last.

    `pieces` cuts an HTTP body into what is written as one chunk each.
    """

    def __init__(
        self,
        scripts: Sequence[Script],
        answers: dict[str, Any] | None = None,
        pieces: Callable[[bytes], list[bytes]] | None = None,
        chunked: bool = True,
    ) -> None:
        self.scripts = scripts
        self.answers = {"/v1/models": {"data": [{"id": "fake"}]}, **(answers or {})}
        self.pieces = pieces or (lambda body: [body])
        self.chunked = chunked
        self.seen: list[Seen] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(limits.patience_s())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(limits.patience_s())

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        self._loop.run_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = None
        try:
            method, path, _ = (await reader.readline()).decode().split()
            headers = {}
            while line := (await reader.readline()).decode().strip():
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            if path.startswith("/v1/") and method == "POST":
                seen = Seen(path, headers, json.loads(body), time.perf_counter())
                self.seen.append(seen)
                await self._stream(seen, self.scripts[min(len(self.seen), len(self.scripts)) - 1], writer)
            else:
                await self._plain(path, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            if seen is not None:
                seen.closed_early.set()
        finally:
            writer.close()

    async def _plain(self, path: str, writer: asyncio.StreamWriter) -> None:
        answer = self.answers.get(path)
        status, body = ("200 OK", json.dumps(answer)) if answer is not None else ("404 Not Found", "{}")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()

    async def _stream(self, seen: Seen, script: Script, writer: asyncio.StreamWriter) -> None:
        if script.ending == "status":
            body = json.dumps({"error": {"message": "the context is too short", "code": 400}})
            writer.write(f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            return
        kind = "Transfer-Encoding: chunked" if self.chunked else "Connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{kind}\r\n\r\n: ping\n\n".encode()
                     if not self.chunked else f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode())  # fmt: skip
        at = time.perf_counter()
        for index, gap in enumerate(script.gaps_s):
            at += gap
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            text = script.texts[index] if script.texts else "x"
            seen.sent.append(time.perf_counter())
            await self._event(writer, json.dumps(_chunk(seen.path, text)))
        if script.ending == "error":
            await self._event(writer, json.dumps({"error": {"message": "the engine died"}}))
        if script.ending == "cut":
            return
        if script.num_tokens:
            usage = {"prompt_tokens": script.num_prompt_tokens, "completion_tokens": script.num_tokens}
            await self._event(writer, json.dumps({"choices": [], "usage": usage}))
        await self._event(writer, "[DONE]")
        if self.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _event(self, writer: asyncio.StreamWriter, data: str) -> None:
        for piece in self.pieces(f"data: {data}\n\n".encode()):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self.chunked else piece)
            await writer.drain()


def _chunk(path: str, text: str) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text}} if "chat" in path else {"index": 0, "text": text}
    return {"id": "1", "choices": [choice], "usage": None}
