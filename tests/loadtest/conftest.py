"""A server that streams at known times, and breaks its streams in known ways: the judge of what users record."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

TTFT_S, GAP_S, NUM_CHUNKS, NUM_TOKENS = 0.20, 0.05, 5, 9  # chunks carry more than one token


class ScriptedServer(ThreadingHTTPServer):
    """Answers every chat with the same stream; the model's name says how the stream is broken."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.arrivals: list[float] = []
        self.authorizations: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "scripted"}]})

    def do_POST(self) -> None:
        self.server.arrivals.append(time.monotonic())
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.authorizations.add(self.headers.get("Authorization"))
        if body["model"] == "status":
            self._whole(503, {"error": {"message": "overloaded"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(body["model"])
        except OSError:
            self.close_connection = True

    def _stream(self, model: str) -> None:
        self._event(_chunk({"role": "assistant", "content": ""}))  # must not count as the first token
        time.sleep(TTFT_S)
        for i in range(NUM_CHUNKS):
            if i:
                time.sleep(GAP_S)
            if i == 2 and model == "cut":
                self.close_connection = True
                self.connection.shutdown(2)
                return
            if i == 2 and model == "error":
                self._event({"error": {"message": "the engine died"}})
                break
            self._event(_chunk({"content": f"w{i} "}))
        self._event(_chunk({}, "stop"))
        usage = {"prompt_tokens": 7, "completion_tokens": NUM_TOKENS, "prompt_tokens_details": {"cached_tokens": 3}}
        self._event({"choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: dict[str, Any]) -> None:
        self._write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
