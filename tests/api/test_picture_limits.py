"""Every limit of pictures through every route and dialect, of tests/api/picture_table.py; and the memory that pictures
of requests in flight take."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.config.media import MediaConfig
from app.records.media import media_of
from tests import limits
from tests.api.conftest import ScriptedClient
from tests.api.json_routes import json_routes
from tests.api.picture_table import CARRIERS, ELSEWHERE, ONE, SHOWING, TEXT_ONLY, Excess, url_of
from tests.media.media_model import reader, seeing, write_media_model

CHAT = "/v1/chat/completions"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media_model(tmp_path_factory.mktemp("limits") / "m", 512)


@pytest.fixture
def make(folder: Path) -> Iterator[Any]:
    """A client of a model under options of `media` and of its engine."""
    readers = []

    def client(media: Any = None, engine: Any = None) -> ScriptedClient:
        readers.append(reader(**(media or {})))
        own = ScriptedClient(seeing(folder, readers[-1], **(engine or {})))
        own.script = lambda request: [40]
        return own

    yield client
    for one in readers:
        one.close()


def post_all(app: Any, sent: list[tuple[str, Any]]) -> list[httpx.Response]:
    async def post() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return [await http.post(path, json=body) for path, body in sent]

    return limits.run(post())


def test_the_table_is_whole() -> None:
    app = create_app(ScriptedClient(), RequestLimits())
    assert json_routes(app) == SHOWING.keys() | TEXT_ONLY.keys()
    assert MediaConfig.model_fields.keys() <= CARRIERS.keys() | ELSEWHERE.keys()
    for place in ELSEWHERE.values():
        path, _, test = place.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), place


@pytest.mark.parametrize("name", CARRIERS)
def test_every_route_keeps_every_limit(make: Any, name: str) -> None:
    excess: Excess = CARRIERS[name]
    client = make(excess.media, excess.engine)
    app = create_app(client, RequestLimits(**excess.limits))
    sent = [(path, show(excess.urls)) for path, shows in SHOWING.items() for show in shows]
    for (path, body), answer in zip(sent, post_all(app, sent), strict=True):
        assert "error" in answer.json(), (path, answer.text)
        message = answer.json()["error"]["message"]
        assert answer.status_code in excess.statuses, (path, body.keys(), message)
        assert re.search(excess.says, message), (path, message)
        assert re.match(r"(input|messages)\.", answer.json()["error"].get("param") or message), (path, answer.text)
    assert not client.requests
    assert app.state.held.total == 0


def test_what_keeps_the_limits_is_taken(make: Any) -> None:
    client = make()
    app = create_app(client, RequestLimits())
    sent = [(path, show([ONE, ONE])) for path, shows in SHOWING.items() for show in shows]
    for (path, _), answer in zip(sent, post_all(app, sent), strict=True):
        assert answer.status_code == 200, (path, answer.text)
    assert len({media_of(request.asks) is not None for request in client.requests}) == 1
    assert app.state.held.total == 0


def test_pixels_count_until_they_are_given_back(make: Any) -> None:
    """While a request runs, the next one finds no room and is told to come back; `n` choices share their pixels."""
    client = make({"cache_bytes": 0})
    url, num_pixel_bytes = url_of(140, 140), 140 * 140 * 3
    body = {"messages": SHOWING[CHAT][0]([url])["messages"], "n": 8}
    num_bytes, num_file_bytes = len(json.dumps(body)), len(url) // 4 * 3
    room = 2 * (num_bytes + num_pixel_bytes) + num_file_bytes + num_bytes // 2
    app = create_app(client, RequestLimits(max_bodies_bytes=2 * room))

    async def play() -> None:
        client.gate = asyncio.Event()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            running = [asyncio.ensure_future(http.post(CHAT, json=body)) for _ in range(2)]
            await limits.until(lambda: client.num_running == 16)
            held = app.state.held.total
            assert 2 * num_pixel_bytes < held <= 2 * (num_bytes + num_pixel_bytes), held
            refused = await http.post(CHAT, json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (429, "overloaded"), error
            assert error["param"] == "messages.0.content.0.image_url"
            assert "leaves it no room" in error["message"]
            assert "retry-after" in refused.headers
            assert app.state.held.total == held
            text = await http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
            assert text.status_code == 200
            client.gate.set()
            assert [(await one).status_code for one in running] == [200, 200]
            assert (await http.post(CHAT, json=body)).status_code == 200
        assert app.state.held.total == 0

    limits.run(play())


def test_a_client_that_leaves_gives_its_pixels_back(make: Any) -> None:
    client = make({"cache_bytes": 0})
    app = create_app(client, RequestLimits())
    body = SHOWING[CHAT][0]([url_of(140, 140, seed) for seed in range(6)])

    async def play() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            leaving = asyncio.ensure_future(http.post(CHAT, json=body))
            await limits.until(lambda: app.state.held.total > 0)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await limits.until(lambda: app.state.held.total == 0)
            assert (await http.post(CHAT, json=body)).status_code == 200

    limits.run(play())
    assert app.state.held.total == 0
