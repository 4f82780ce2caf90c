"""The rule for fields and headers that nothing depends on: which bodies may have unknown ones, and how all are told.

Each is counted under its name in the tables of ignored ones, or as `other`: a client cannot make series of the metric.
The names of unknown ones go to the log, each name once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal

from starlette.requests import Request

from app.api.http.http_metrics import HttpMetrics, handler_of
from app.api.http.strict_models import IgnoredFields

logger = logging.getLogger("manta.api")

MAX_LOGGED = 256  # different (path, name) that are told by one process
MAX_NAME_CHARS = 64


class FieldRule:
    """That of one application."""

    def __init__(self, unknown: Literal["auto", "refuse", "ignore"] = "refuse") -> None:
        self._unknown = unknown
        self._logged: set[tuple[str, str]] = set()

    def ignores_unknown(self, model: type[Any]) -> bool:
        """True if unknown fields of a body are ignored."""
        if self._unknown == "auto":
            return bool(getattr(model, "is_lenient", False))
        return self._unknown == "ignore"

    def count(self, request: Request, ignored: IgnoredFields) -> None:
        """Count what a body has in vain, and log the names of what is unknown."""
        metrics: HttpMetrics | None = getattr(request.app.state, "http_metrics", None)
        if metrics is not None:
            for name, number in ignored.items():
                metrics.count_ignored(name, number)
        if ignored.unknown:
            self._log(handler_of(request.scope), ignored.unknown)

    def _log(self, path: str, names: Iterable[str]) -> None:
        new = {(path, name[:MAX_NAME_CHARS]) for name in names} - self._logged
        if new and len(self._logged) < MAX_LOGGED:
            self._logged |= new
            logger.warning("%s: ignored unknown fields: %s", path, ", ".join(sorted(repr(name) for _, name in new)))


STRICT = FieldRule()


def rule_of(request: Request) -> FieldRule:
    """That of the request's application."""
    rule: FieldRule = getattr(request.app.state, "field_rule", STRICT)
    return rule
