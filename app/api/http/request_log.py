"""The end of each HTTP request: a line in the access log, its counters, its spans."""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import Scope

from app.api.http.http_metrics import HttpMetrics, handler_of
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.telemetry.logging import FIELDS
from app.telemetry.request_record import CURRENT, GenerationRecord, RequestRecord, TraceParent
from app.telemetry.tenant_tokens import TenantLabels
from app.telemetry.tracing import Tracing

access_log = logging.getLogger("manta.access")

# What machines ask every few seconds: neither logged nor counted nor traced.
QUIET_PATHS = frozenset({"/health", "/live", "/ready", "/ping", "/load", "/metrics", "/metrics/targets"})
REPLICA_PATH = "/metrics/replicas/"  # and before the name of one
BROKEN = "stream_is_broken"  # in a request's state: its stream has ended with an error event

MAX_PATH_CHARS = 1024  # of a path in the log
SAFE_IN_PATHS = "/:@!$&'()*+,;=~"


def begin_record(scope: Scope, headers: Headers) -> RequestRecord | None:
    """Begins what will be remembered of a request; None for those that nobody wants to see."""
    if scope["path"] in QUIET_PATHS or scope["path"].startswith(REPLICA_PATH):
        return None
    given = headers.get("traceparent")
    parent = None if given is None else TraceParent.parse(given, headers.get("tracestate"))
    record = RequestRecord(scope["method"], scope["path"], parent)
    if parent is not None or getattr(scope["app"].state, "tracing", None) is not None:
        record.begin_trace()
    return record


def note_generation(model: str, request: EngineRequest) -> GenerationRecord:
    """A request goes to an engine on behalf of the HTTP request whose context this is."""
    work = request.work
    seed = work.seed if isinstance(work, SamplingParams) else None
    num_prompt_tokens = request.num_client_tokens
    generation = GenerationRecord(model, request.request_id, num_prompt_tokens, request.max_tokens, seed)
    if (record := CURRENT.get()) is not None:
        record.add(generation)
    return generation


def end_record(record: RequestRecord, scope: Scope, status: int, *, is_counted: bool) -> None:
    """Log, count and trace a request that was answered with `status`."""
    state, app_state = scope["state"], scope["app"].state
    record.ended = time.monotonic()
    record.status, record.request_id = status, state["request_id"]
    if tenant := state.get("tenant", ""):
        labels: TenantLabels = getattr(app_state, "tenant_labels", None) or TenantLabels()
        record.tenant = labels.of(tenant)
    record.is_broken = bool(state.get(BROKEN))
    elapsed_s = record.ended - record.started
    if getattr(app_state, "has_access_log", True) and access_log.isEnabledFor(logging.INFO):
        path = quote(record.path[:MAX_PATH_CHARS], SAFE_IN_PATHS)  # as it came: decoded, it may hold ends of lines
        line = (record.method, path, status, elapsed_s * 1e3, record.request_id)
        access_log.info("%s %s %d %.1f ms %s", *line, extra={FIELDS: record.log_fields()})
    http_metrics: HttpMetrics | None = getattr(app_state, "http_metrics", None)
    if http_metrics is not None and is_counted:
        http_metrics.count(scope, status, elapsed_s)
    tracing: Tracing | None = getattr(app_state, "tracing", None)
    if tracing is not None:
        record.handler = handler_of(scope)
        tracing.export(record)
