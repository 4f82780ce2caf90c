"""An OTLP/HTTP collector in this process, which keeps the spans that it gets: of tests, and of tools.trace_tree."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """`with Receiver() as receiver:` listens at `receiver.endpoint`, on this machine only; port 0 is a free one."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[Span] = []
        self._lock = threading.Lock()
        self.resources: list[dict[str, Any]] = []
        self.raw = b""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.take(self.path, gzip.decompress(body) if self.headers.get("content-encoding") else body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            with self._lock:
                self.resources.append(attributes(resource.resource))
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def pop(self, trace_id: bytes) -> list[Span]:
        """The spans of one trace, which are kept no longer."""
        with self._lock:
            found = [span for span in self.spans if span.trace_id == trace_id]
            self.spans = [span for span in self.spans if span.trace_id != trace_id]
        return found

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(thing: Any) -> dict[str, Any]:
    """Attributes of a span, an event or a resource."""
    return {pair.key: _value(pair.value) for pair in thing.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)
