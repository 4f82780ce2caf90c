"""The table of endpoints: one from outside of the tree is one file and one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.endpoints import ENDPOINTS
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.limits import run

FILE = """
from fastapi import APIRouter, Request
from app.api.http.body import describe_body, read_body
from app.api.endpoint import Endpoint
from app.api.http.strict_models import StrictModel

class EchoRequest(StrictModel):
    word: str

def routes(api):
    router = APIRouter()

    @router.post("/echo", openapi_extra=describe_body(EchoRequest))
    async def echo(request: Request) -> dict[str, str]:
        return {"word": (await read_body(request, EchoRequest)).word}

    return router

ENDPOINT = Endpoint(routes, (EchoRequest,))
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_endpoint.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(ENDPOINTS._table, "echo", "echo_endpoint:ENDPOINT")
    monkeypatch.delitem(sys.modules, "echo_endpoint", raising=False)


@pytest.mark.usefixtures("echo")
def test_an_endpoint_is_one_file_and_one_line(client: Any) -> None:
    app = create_app(client, RequestLimits())

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return [await http.post("/echo", json=body) for body in ({"word": "hi"}, {"word": "hi", "wrod": 1})]

    answered, refused = run(main())
    assert answered.json() == {"word": "hi"}
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "wrod")
    assert "EchoRequest" in app.openapi()["components"]["schemas"]
