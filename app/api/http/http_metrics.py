"""Counts HTTP requests as prometheus-fastapi-instrumentator does, whose series vLLM's dashboards read."""

from __future__ import annotations

from starlette.types import Scope

from app.telemetry.metrics import LABEL_VALUES, MetricsRecorder

NO_ROUTE = "none"
OTHER_METHOD = "other"
_METHODS = frozenset(LABEL_VALUES["method"])


class HttpMetrics:
    """One application's."""

    def __init__(self, recorder: MetricsRecorder) -> None:
        self._recorder = recorder

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """A request was answered with `status`, `seconds` after it came."""
        method = scope["method"] if scope["method"] in _METHODS else OTHER_METHOD
        handler = handler_of(scope)
        self._recorder.increment("http_requests_total", 1.0, handler, method, f"{status // 100}xx")
        self._recorder.observe("http_request_duration_seconds", seconds, handler, method)


def handler_of(scope: Scope) -> str:
    """The path of a request's route, as it was declared: what clients write into paths must not become labels."""
    if (route := scope.get("route")) is not None:
        return str(getattr(route, "path", NO_ROUTE))
    state = scope["app"].state  # a middleware may have routed a copy of the scope
    if (paths := getattr(state, "fixed_paths", None)) is None:
        declared = (getattr(route, "path", "") for route in scope["app"].routes)
        paths = state.fixed_paths = frozenset(path for path in declared if "{" not in path)
    return scope["path"] if scope["path"] in paths else NO_ROUTE
