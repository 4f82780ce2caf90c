"""Routes of several routers in one application."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from app.api.http.joined_routes import join_routes


class Body(BaseModel):
    """What a route reads."""

    number: int


def routers() -> tuple[APIRouter, APIRouter]:
    """One that hides its routes, and one with a tag, another's routes and a body."""
    hidden, inner, outer = APIRouter(include_in_schema=False), APIRouter(tags=["inner"]), APIRouter(tags=["outer"])

    def twice(body: Body) -> dict[str, int]:
        return {"number": 2 * body.number}

    hidden.add_api_route("/a", lambda: "a")
    inner.add_api_route("/b/{name}", lambda name: name)
    outer.add_api_route("/c", twice, methods=["POST"])
    join_routes(outer, inner)
    return hidden, outer


def test_they_are_those_of_routers_that_are_included() -> None:
    joined, included = FastAPI(), FastAPI()
    join_routes(joined, *routers())
    for router in routers():
        included.include_router(router)
    assert joined.openapi() == included.openapi()
    assert list(joined.openapi()["paths"]) == ["/c", "/b/{name}"]

    def answers(app: FastAPI) -> list[Any]:
        client = TestClient(app)
        asked = [
            client.get("/a"),
            client.get("/b/x"),
            client.post("/c", json={"number": 3}),
            client.post("/c", json={}),
        ]
        return [(answer.status_code, answer.json()) for answer in asked]

    assert answers(joined) == answers(included)
    assert answers(joined)[2] == (200, {"number": 6})
