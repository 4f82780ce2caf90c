"""A request in this process gets what a client would get over a connection."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from app.api.http.in_process import Answer, post_in_process


async def echo(request: Request) -> Response:
    body = await request.json()
    return JSONResponse({"was": body, "tenant": request.scope.get("tenant")}, 201, {"X-Request-Id": "r1"})


async def busy(request: Request) -> Response:
    return PlainTextResponse("later", 503, {"Retry-After": "7"})


APP = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/busy", busy, methods=["POST"])])


@pytest.mark.parametrize("path", ["/echo", "/busy", "/nowhere"])
def test_as_over_a_connection(path: str) -> None:
    async def main() -> None:
        answer = await post_in_process(APP, path, b'{"a": 1}')
        async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://test") as http:
            over = await http.post(path, content=b'{"a": 1}', headers={"content-type": "application/json"})
        assert answer == Answer.of(over.status_code, dict(over.headers), over.content)

    asyncio.run(main())


def test_what_the_answer_says() -> None:
    answer = asyncio.run(post_in_process(APP, "/echo", b"[2]", {"tenant": "t"}))
    assert (answer.status, answer.body, answer.request_id) == (201, {"was": [2], "tenant": "t"}, "r1")
    later = asyncio.run(post_in_process(APP, "/busy", b"{}"))
    assert (later.status, later.body, later.retry_after_s, later.raw) == (503, "later", 7.0, b"later")
