"""Finds an application's routes, as they were declared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from starlette.routing import BaseRoute


def declared_routes(routes: Iterable[BaseRoute]) -> Iterator[Any]:
    """The routes that have a path. Those of a router that was included without a prefix stand among the others up to
    FastAPI 0.136, and later within the router, which is one of the routes then."""
    for route in routes:
        if (included := getattr(route, "original_router", None)) is not None:
            yield from declared_routes(included.routes)
        elif hasattr(route, "path"):
            yield route
