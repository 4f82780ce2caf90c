"""OpenTelemetry traces of HTTP requests, with the names of the GenAI conventions (all of them, in this file).

The names are those of open-telemetry/semantic-conventions-genai in its state of development of 2026. Spans are made at
the end of a request out of its record, with explicit times; engines carry no OpenTelemetry. Nothing is traced unless
OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) is set; the SDK reads its further variables itself, of sampling
(OTEL_TRACES_SAMPLER) and export too. No span holds a prompt, an answer or a key.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from app.errors import ConfigError
from app.telemetry.request_record import GenerationRecord, Leg, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SERVICE = "manta"
PROVIDER = "manta"
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/v1/embed": "embeddings",
    "/v1/score": "score",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/score": "score",
    "/classify": "classify",
}
CHAT = "chat"  # all others that generate

# Attributes of the HTTP and GenAI conventions.
HTTP_METHOD, HTTP_ROUTE, HTTP_STATUS = "http.request.method", "http.route", "http.response.status_code"
ERROR_TYPE = "error.type"
OPERATION, PROVIDER_NAME = "gen_ai.operation.name", "gen_ai.provider.name"
REQUEST_MODEL, REQUEST_MAX_TOKENS = "gen_ai.request.model", "gen_ai.request.max_tokens"
REQUEST_SEED, CHOICE_COUNT = "gen_ai.request.seed", "gen_ai.request.choice.count"
RESPONSE_ID, FINISH_REASONS = "gen_ai.response.id", "gen_ai.response.finish_reasons"
FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
# Our own.
REQUEST_ID, TENANT, ENGINE_REQUEST = "manta.request_id", "manta.tenant", "manta.engine_request_id"
REPLICA, LEVEL, HIT_TOKENS = "manta.replica", "manta.route.level", "manta.route.hit_tokens"
ROUTE, QUEUE, PREFILL, DECODE = "route", "queue", "prefill", "decode"
FIRST_TOKEN, PREEMPTED, MIGRATED = "first_token", "preempted", "migrated"


class Tracing:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Tracing | None:
        """None where no endpoint is set; ConfigError where the libraries are not there."""
        if not any(environ.get(name) for name in ENDPOINTS) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            text = f"{error.name} is missing: pip install 'manta-serve[tracing]', or unset it"
            raise ConfigError(f"{ENDPOINTS[0]} asks for traces, but {text}", param=ENDPOINTS[0]) from error
        name = {} if environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: SERVICE}
        provider = TracerProvider(resource=Resource.create(name), id_generator=_id_generator())
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def export(self, record: RequestRecord) -> None:
        """The spans of a request that has ended, if it is sampled."""
        from opentelemetry.trace import SpanKind

        ids = self._provider.id_generator
        ids.next_trace_id = int(record.trace_id, 16)  # type: ignore[attr-defined]
        name = f"{record.method} {record.handler}"
        attributes = {HTTP_METHOD: record.method, HTTP_ROUTE: record.handler, REQUEST_ID: record.request_id}
        if record.tenant:
            attributes[TENANT] = record.tenant
        server = self._tracer.start_span(
            name, _remote(record), SpanKind.SERVER, attributes, start_time=record.ns(record.started)
        )
        if server.is_recording():
            server.set_attribute(HTTP_STATUS, record.status)
            if record.status >= 500 or record.is_broken:
                _fail(server, str(record.status) if record.status >= 500 else "stream_broken")
            if record.generations:
                self._model_span(record, server)
        server.end(record.ns(record.ended))

    def _model_span(self, record: RequestRecord, server: Span) -> None:
        """The call of the model, and what became of each of its choices."""
        first, operation = record.generations[0], OPERATIONS.get(record.handler, CHAT)
        span = self._child(f"{operation} {first.model}", server, record.ns(first_asked(record)))
        span.set_attributes(_model_attributes(record, first, operation))
        if failed := next((one.error for one in record.generations if one.error), ""):
            _fail(span, failed)
        for generation in record.generations:
            for leg, following in zip(generation.legs, [*generation.legs[1:], None], strict=True):
                self._leg_spans(record, generation, leg, span)
                if following is not None:
                    _note_migration(record, span, leg, following)
        span.end(record.ns(record.ended))

    def _leg_spans(self, record: RequestRecord, generation: GenerationRecord, leg: Leg, parent: Span) -> None:
        """Route, queue, prefill and decode at one replica: by its own offsets where they came, else as seen here."""
        own = {REPLICA: leg.replica_id, ENGINE_REQUEST: generation.request_id}
        ended = leg.ended_at if leg.ended_at is not None else record.ended
        scheduled = min(leg.sent_at + leg.queue_s, leg.first_at or ended)
        route = self._child(ROUTE, parent, record.ns(leg.asked_at))
        route.set_attributes(own | {LEVEL: leg.level or "choice", HIT_TOKENS: leg.num_hit_tokens})
        route.end(record.ns(leg.sent_at))
        spans = [(QUEUE, leg.sent_at, scheduled)]
        if leg.first_at is not None:
            spans += [(PREFILL, scheduled, leg.first_at), (DECODE, leg.first_at, ended)]
        for name, begin, end in spans:
            span = self._child(name, parent, record.ns(begin))
            span.set_attributes(own)
            if name == DECODE:
                span.add_event(FIRST_TOKEN, timestamp=record.ns(begin))
            for offset_s in leg.times.preempted_s if leg.times is not None else ():
                if begin <= leg.sent_at + offset_s < end or (name == DECODE and leg.sent_at + offset_s >= end):
                    span.add_event(PREEMPTED, timestamp=record.ns(leg.sent_at + offset_s))
            span.end(record.ns(max(begin, end)))

    def _child(self, name: str, parent: Span, start_ns: int) -> Span:
        from opentelemetry.trace import set_span_in_context

        return self._tracer.start_span(name, set_span_in_context(parent), start_time=start_ns)


def first_asked(record: RequestRecord) -> float:
    """When the first replica was looked for; the end where none was."""
    return min((leg.asked_at for one in record.generations for leg in one.legs), default=record.ended)


def _model_attributes(record: RequestRecord, first: GenerationRecord, operation: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        OPERATION: operation,
        PROVIDER_NAME: PROVIDER,
        REQUEST_MODEL: first.model,
        RESPONSE_ID: record.request_id,
        FINISH_REASONS: [one.finish_reason for one in record.generations if one.finish_reason],
        INPUT_TOKENS: max(one.num_prompt_tokens for one in record.generations),
        OUTPUT_TOKENS: record.num_output_tokens,
        CACHED_TOKENS: max((one.legs[0].num_cached_tokens for one in record.generations if one.legs), default=0),
    }
    if first.max_tokens is not None:
        attributes[REQUEST_MAX_TOKENS] = first.max_tokens
    if first.seed is not None:
        attributes[REQUEST_SEED] = first.seed
    if len(record.generations) > 1:
        attributes[CHOICE_COUNT] = len(record.generations)
    if record.first_at is not None:
        attributes[FIRST_CHUNK] = record.first_at - record.started
    return attributes


def _note_migration(record: RequestRecord, span: Span, leg: Leg, following: Leg) -> None:
    attributes: dict[str, str | int] = {
        "from": leg.replica_id,
        "to": following.replica_id,
        "tokens": following.num_before,
        "reason": leg.left_because,
    }
    span.add_event(MIGRATED, attributes, record.ns(leg.ended_at or following.asked_at))


def _fail(span: Span, kind: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR))


def _remote(record: RequestRecord) -> Any:
    """The context of the client's span; an empty one where it sent none."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if (parent := record.parent) is None:
        return Context()
    state = TraceState.from_header([parent.state]) if parent.state else None
    remote = SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, TraceFlags(parent.flags), state)
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _id_generator() -> Any:
    """Makes span ids, and for a span without a parent the trace id that the request's log line has."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        next_trace_id = 0

        def generate_trace_id(self) -> int:
            return self.next_trace_id or super().generate_trace_id()

    return Ids()
