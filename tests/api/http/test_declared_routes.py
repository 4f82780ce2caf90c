"""The routes, whether the framework copies those of included routers or keeps the routers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, FastAPI

from app.api.http.declared_routes import declared_routes


def test_of_included_routers_too() -> None:
    inner, outer, app = APIRouter(), APIRouter(), FastAPI(openapi_url=None)
    inner.add_api_route("/a/{b}", lambda b: b)
    outer.include_router(inner)
    outer.add_api_route("/c", lambda: 1, methods=["POST"])
    app.include_router(outer)
    app.add_api_route("/d", lambda: 1)
    assert sorted(route.path for route in declared_routes(app.routes)) == ["/a/{b}", "/c", "/d"]


def test_a_router_that_is_kept_whole() -> None:
    kept: Any = SimpleNamespace(original_router=SimpleNamespace(routes=[SimpleNamespace(path="/a")]))
    others: list[Any] = [SimpleNamespace(path="/b"), SimpleNamespace()]
    assert [route.path for route in declared_routes([kept, *others])] == ["/a", "/b"]
