"""The routes of busy paths: found first, and left by those who ask without anybody else's help."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from app.api.engine_client import RouteInfo
from app.api.http.busy_paths import BUSY_PATHS
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.records.outputs import EngineOutput
from app.records.pooling_info import PoolingInfo
from app.records.request import EngineRequest
from tests import limits
from tests.api.conftest import ScriptedClient, served, write_model

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 4}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [CHAT, CHAT | {"stream": True}],
    "/v1/completions": [{"model": "m", "prompt": "fox"}, {"model": "m", "prompt": "fox", "stream": True}],
    "/v1/messages": [CHAT, CHAT | {"stream": True}],
    "/v1/embeddings": [{"model": "vectors", "input": "fox"}, {"model": "vectors", "input": ["fox", "dog"]}],
}
CASES = [(path, body) for path, bodies in BODIES.items() for body in bodies]


class Silent(ScriptedClient):
    """An engine that never says anything."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            served(directory), served(directory, "vectors", pooling=PoolingInfo("mean", False, ("embed",)))
        )
        self.begun = asyncio.Event()

    async def generate(
        self, model: str, request: EngineRequest, route: RouteInfo | None = None
    ) -> AsyncIterator[EngineOutput]:
        self.num_running += 1
        self.begun.set()
        try:
            await asyncio.Event().wait()
            yield EngineOutput(request.request_id, [])
        finally:
            self.num_running -= 1


def scope_of(path: str) -> dict[str, Any]:
    """A POST of JSON."""
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "root_path": "", "http_version": "1.1",
    }  # fmt: skip


def test_all_of_them_are_left_below() -> None:
    assert set(BODIES) == BUSY_PATHS


@pytest.mark.parametrize(("path", "body"), CASES)
def test_a_client_that_leaves_ends_its_request(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    """Nobody cancels the task: what ends it is the message that the client has gone."""
    client = Silent(write_model(tmp_path))
    app = create_app(client, RequestLimits())
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await client.begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        return

    async def check() -> None:
        client.begun = asyncio.Event()
        await app(scope_of(path), receive, send)
        assert client.begun.is_set()
        assert client.num_running == 0

    limits.run(check())


def test_a_client_that_leaves_within_its_body_ends_its_request(tmp_path: Path) -> None:
    app = create_app(ScriptedClient(served(write_model(tmp_path))), RequestLimits())

    async def leave(path: str) -> None:
        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            return

        await app(scope_of(path), receive, send)

    for path in BUSY_PATHS:
        limits.run(leave(path))


def test_their_routes_come_first(tmp_path: Path) -> None:
    app: FastAPI = create_app(ScriptedClient(served(write_model(tmp_path))), RequestLimits())
    paths = [getattr(route, "path", "") for route in app.router.routes]
    posts = [one for one in app.router.routes if isinstance(one, APIRoute) and one.path in BUSY_PATHS]
    assert {one.path for one in posts if "POST" in one.methods} == BUSY_PATHS
    assert paths[: len(posts)] == [one.path for one in posts]
