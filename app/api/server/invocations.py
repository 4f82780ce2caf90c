"""POST /invocations: the one route that SageMaker calls. A body says by its fields which route it is for."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.api.endpoint import Endpoint
from app.errors import InvalidRequestError

# Fields that tell a body, in the order in which they are looked for, and the route of such a body.
ROUTES: Mapping[tuple[str, ...], str] = {
    ("messages",): "/v1/chat/completions",
    ("prompt",): "/v1/completions",
    ("query", "documents"): "/v1/rerank",
    ("text_1", "text_2"): "/v1/score",
    ("input",): "/v1/embeddings",
}


class _Forwarded(Response):
    """The answer of another route of the application to the same body."""

    def __init__(self, path: str, raw: bytes) -> None:
        super().__init__()
        self._path = path
        self._raw = raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the other route answer. The client's leaving is heard as there."""
        is_sent = False

        async def replay() -> Message:
            nonlocal is_sent
            if is_sent:
                return await receive()
            is_sent = True
            return {"type": "http.request", "body": self._raw, "more_body": False}

        moved = {name: value for name, value in scope.items() if name not in ("route", "endpoint", "path_params")}
        moved |= {"path": self._path, "raw_path": self._path.encode()}
        await scope["app"].router(moved, replay, send)


def invocation_routes() -> APIRouter:
    """The route."""
    router = APIRouter(tags=["service"])

    @router.post("/invocations")
    async def invoke(request: Request) -> Response:
        """Answer a body of chats, completions, embeddings, scores or rerankings, as its own route does."""
        raw = await request.body()
        return _Forwarded(_route_of(raw), raw)

    return router


def _route_of(raw: bytes) -> str:
    try:
        named = set(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    except (ValueError, RecursionError):
        named = set()  # the route says what is wrong with it
    if not named:
        return "/v1/chat/completions"
    for fields, path in ROUTES.items():
        if named >= set(fields):
            return path
    known = "; ".join(" and ".join(fields) for fields in ROUTES)
    raise InvalidRequestError(f"no route takes these fields; a body has one of: {known}")


ENDPOINT = Endpoint(lambda api: invocation_routes())
