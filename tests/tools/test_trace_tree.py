"""The tree that tools.trace_tree prints, of spans as a collector gets them."""

from __future__ import annotations

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tools.trace_tree import finished, tree

MS = 1_000_000


def span(own: bytes, parent: bytes, name: str, start_ms: int, end_ms: int, **told: str) -> Span:
    attributes = [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in told.items()]
    return Span(
        trace_id=b"t" * 16, span_id=own, parent_span_id=parent, name=name, attributes=attributes,
        start_time_unix_nano=(1000 + start_ms) * MS, end_time_unix_nano=(1000 + end_ms) * MS,
    )  # fmt: skip


def test_parents_come_before_children_and_children_by_time() -> None:
    chat = span(b"chat", b"post", "chat m", 1, 100)
    moved = [KeyValue(key="from", value=AnyValue(string_value="a"))]
    chat.events.add(name="migrated", time_unix_nano=1050 * MS, attributes=moved)
    second = span(b"2", b"chat", "decode", 50, 100, **{"manta.replica_id": "b", "manta.engine_request_id": "long"})
    lines = tree([second, span(b"1", b"chat", "decode", 10, 50), chat, span(b"post", b"client", "POST /", 0, 100)])
    _, _, post, model, event, first, last = lines.split("\n")
    assert post.endswith("#" * 40 + "  POST /")  # its parent is the client's own span, which is not here
    assert model.startswith("   1.0 ms   99.0 ms")
    assert model.endswith("    chat m")
    assert event.startswith("  50.0 ms")
    assert event.endswith("* migrated  from=a")
    assert [line.index("decode") for line in (first, last)] == [model.index("chat m") + 2] * 2
    assert first.count("#") == 16
    assert last.endswith("decode  replica_id=b")


def test_a_trace_is_whole_when_its_server_span_has_come() -> None:
    inner = span(b"1", b"2", "decode", 0, 1)
    assert finished([inner]) == []
    server = span(b"2", b"", "POST /", 0, 1)
    server.kind = Span.SPAN_KIND_SERVER
    assert finished([inner, server]) == [b"t" * 16]
