"""Guesses what a client was after that found no route: its path with one `/v1` more or less, or a websocket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Match

if TYPE_CHECKING:  # as in errors.py
    from fastapi import Request

MAX_PATH = 1024  # characters; a longer path is no slip and is not looked at


def route_hint(request: Request) -> str:
    """The end of the message of a 404; empty when no route is near."""
    path = request.url.path
    if len(path) > MAX_PATH:
        return ""
    if _exists(request, path, "websocket"):
        return "; it is a websocket: open it with a client of websockets"
    found = path.rfind("/v1/")  # as in /v1/v1/messages, /openai/v1/models, /v1/tokenize
    nears = (path[found:], path[found + 3 :]) if found >= 0 else ("/v1" + path,)
    for near in nears:
        if near != path and _exists(request, near):
            return f"; there is {near}: {_advice(path, near)}"
    return ""


def _advice(path: str, near: str) -> str:
    if path.startswith("/v1/v1/"):
        return "this client adds /v1 itself, so its base URL must end before it"
    if near == "/v1" + path:
        return "the base URL of OpenAI's clients ends in /v1"
    return "the base URL has a part too much"


def _exists(request: Request, path: str, kind: str = "http") -> bool:
    scope = {**request.scope, "type": kind, "path": path, "raw_path": path.encode()}
    return any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes)
