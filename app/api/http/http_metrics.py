"""Counts HTTP requests as prometheus-fastapi-instrumentator does, whose series vLLM's dashboards read."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope

from app.telemetry.metrics import LABEL_VALUES
from app.telemetry.metrics_recorder import MetricsRecorder

NO_ROUTE = "none"
OTHER_METHOD = "other"
SWITCHING = 101  # a websocket was accepted
_METHODS = frozenset(LABEL_VALUES["method"])

# Headers of the SDKs and their programs that say something of other servers. What no table names is not looked at.
IGNORED_HEADERS: Mapping[str, str] = {
    "anthropic-beta": "the fields of a beta are read, ignored or refused without it",
    "anthropic-dangerous-direct-browser-access": "see `ingress.cors_origins`",
    "anthropic-user-profile-id": "there are no user profiles",
    "anthropic-workspace-id": "there are no workspaces",
    "openai-beta": "the fields of a beta are read, ignored or refused without it",
    "openai-organization": "tenants are told apart by their keys",
    "openai-project": "tenants are told apart by their keys",
}
_IGNORED = {name.encode(): name for name in IGNORED_HEADERS}


class HttpMetrics:
    """One application's."""

    def __init__(self, recorder: MetricsRecorder) -> None:
        self._recorder = recorder

    def count(self, scope: Scope, status: int, seconds: float) -> None:
        """A request was answered with `status`, `seconds` after it came."""
        method = scope["method"] if scope["method"] in _METHODS else OTHER_METHOD
        handler = handler_of(scope)
        self._recorder.increment("http_requests_total", 1.0, handler, method, f"{status // 100}xx")
        if status != SWITCHING:  # that time would be a websocket's life
            self._recorder.observe("http_request_duration_seconds", seconds, handler, method)
        for name in _IGNORED.keys() & {name for name, _ in scope["headers"]}:
            self.count_ignored(_IGNORED[name])

    def count_ignored(self, name: str, number: int = 1) -> None:
        """A field or header, under its name in a table, that nothing depends on."""
        self._recorder.increment("manta:ingress_ignored_fields_total", float(number), name)


def handler_of(scope: Scope) -> str:
    """The path of a request's route, as it was declared: what clients write into paths must not become labels."""
    if (route := scope.get("route")) is not None:
        return str(getattr(route, "path", NO_ROUTE))
    state = scope["app"].state  # a middleware may have routed a copy of the scope
    if (paths := getattr(state, "fixed_paths", None)) is None:
        declared = (route.path for route in scope["app"].routes)
        paths = state.fixed_paths = frozenset(path for path in declared if "{" not in path)
    return scope["path"] if scope["path"] in paths else NO_ROUTE
