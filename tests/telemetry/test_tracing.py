"""When there is tracing at all, and spans of records that need no server."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.errors import ConfigError
from app.telemetry.request_record import EngineTimes, GenerationRecord, Leg, RequestRecord
from app.telemetry.tracing import Tracing, _id_generator


def test_off_unless_an_endpoint_is_set() -> None:
    assert Tracing.from_environment({}) is None
    assert Tracing.from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None
    assert Tracing.from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}) is None


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry.exporter"):
            raise ImportError("none", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'manta-serve\[tracing\]'"):
        Tracing.from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})


def test_preemptions_stand_where_they_happened() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=_id_generator())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record = RequestRecord("POST", "/v1/completions", handler="/v1/completions", status=200, request_id="r")
    record.begin_trace()
    start = record.started
    record.ended = start + 10.0
    times = EngineTimes(1.0, 3.0, 9.0, [2.0, 5.0])
    leg = Leg(start, start, "a", first_at=start + 3.0, ended_at=start + 9.0, queue_s=1.0, times=times)
    record.add(GenerationRecord("m", "r-0", 4, legs=[leg], num_output_tokens=7, finish_reason="stop"))
    Tracing(provider).export(record)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert f"{spans['POST /v1/completions'].context.trace_id:032x}" == record.trace_id
    events = {name: [(e.name, e.timestamp - record.started_ns) for e in spans[name].events] for name in spans}
    assert events["prefill"] == [("preempted", 2_000_000_000)]
    assert events["decode"] == [("first_token", 3_000_000_000), ("preempted", 5_000_000_000)]
    assert events["queue"] == []
