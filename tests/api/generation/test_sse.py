"""A silent stream says that it lives."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}, ": keep-alive\n\n"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}, ": keep-alive\n\n"),
        ("/v1/messages", {"model": "m", "messages": HI, "max_tokens": 2}, "event: ping\n"),
    ],
)
def test_keep_alives(client: Any, path: str, body: dict[str, Any], sign: str) -> None:
    client.delay_s = 0.5
    app = create_app(client, RequestLimits(), IngressConfig(sse_keep_alive_s=0.02))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post(path, json={**body, "stream": True})

    response = asyncio.run(send())
    assert response.text.count(sign) >= 3
    events = [event for event in response.text.split("\n\n") if event and not event.startswith((":", "event: ping"))]
    assert all(event.startswith(("data: ", "event: ")) for event in events)
    assert events[0].startswith(("event: message_start", "event: response.created", 'data: {"id"')), "the start first"


def test_an_engine_that_refuses_late_ends_the_stream(client: Any) -> None:
    client.delay_s, client.fail_after = 0.5, (0, RuntimeError("broken"))
    app = create_app(client, RequestLimits(), IngressConfig(sse_keep_alive_s=60))

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post("/v1/messages", json={"model": "m", "messages": HI, "max_tokens": 2, "stream": True})

    assert asyncio.run(send()).status_code == 500, "nothing was said yet, so the status is the error's own"
