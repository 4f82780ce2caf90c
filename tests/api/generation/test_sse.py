"""A silent stream says that it lives."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import httpx
import pytest
from starlette.types import Message

from app.api.engine_client import RouteInfo
from app.api.generation.events import Event
from app.api.generation.sse import DONE, EventFormat, EventStreamResponse
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


class Silent:
    """Events that end at once."""

    route = RouteInfo()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        return None

    async def next_batch(self) -> list[Event]:
        return []


class Plain(EventFormat):
    """Says the end alone."""

    def start(self) -> str:
        return ""

    def event(self, event: Event) -> str:
        return ""

    def end(self) -> str:
        return DONE


def test_no_keep_alive_follows_the_end() -> None:
    """Not even one that is due all the time, while a slow client takes the last message."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        for _ in range(20):
            await asyncio.sleep(0)

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def answer() -> None:
        app = SimpleNamespace(state=SimpleNamespace(sse_keep_alive_s=0.0))
        await EventStreamResponse(Silent(), Plain())({"type": "http", "app": app}, receive, send)

    asyncio.run(answer())
    assert [message.get("more_body", True) for message in sent].index(False) == len(sent) - 1
