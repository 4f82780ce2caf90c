"""Media that are meant to do harm, over HTTP: each is refused by a readable 400 that names its field, or shown as what
its first bytes say, and memory stays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.media.reader import MediaReader
from app.records.media import MediaAsk
from tests.api.conftest import ScriptedClient
from tests.media.hostile import Case, cases
from tests.media.media_model import reader, seeing, write_media_model

CASES = cases()
FIELD = "messages.0.content.0.image_url"
MAX_GROWTH_BYTES = 200 << 20


@pytest.fixture(scope="module")
def own() -> Iterator[MediaReader]:
    own = reader(allowed_media_domains=("images.example",), cache_bytes=0)
    yield own
    own.close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, own: MediaReader) -> ScriptedClient:
    return ScriptedClient(seeing(write_media_model(Path(tmp_path_factory.mktemp("hostile")) / "m"), own))


def ask(client: ScriptedClient, some: list[Case]) -> list[httpx.Response]:
    async def post() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(client, RequestLimits()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            bodies = [{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
                       "max_tokens": 2} for _, url, _ in some]  # fmt: skip
            return [await http.post("/v1/chat/completions", json=body) for body in bodies]

    return asyncio.run(post())


def test_there_are_many() -> None:
    assert len(CASES) >= 120
    assert len({name for name, _, _ in CASES}) == len(CASES)


@pytest.mark.parametrize("start", range(0, len(CASES), 10))
def test_each_is_refused_or_a_picture(client: ScriptedClient, start: int) -> None:
    some = CASES[start : start + 10]
    for (name, _, refused), answer in zip(some, ask(client, some), strict=True):
        assert answer.status_code == (400 if refused else 200), (name, answer.text[:300])
        if refused:
            error = answer.json()["error"]
            assert error["param"] == FIELD, (name, error)
            assert error["message"].startswith(FIELD), (name, error)
            assert 40 < len(error["message"]) < 400, (name, error)
            assert "Traceback" not in error["message"]
        else:
            media = client.requests[-1].asked(MediaAsk)
            assert media is not None, name


def test_memory_stays(client: ScriptedClient) -> None:
    """That of the server and of all that decode for it, over what one good picture takes."""

    def resident() -> int:
        own = psutil.Process()
        return int(sum(process.memory_info().rss for process in (own, *own.children())))

    good = [case for case in CASES if not case[2]][:1]
    ask(client, good)
    before = resident()
    for _ in range(2):
        ask(client, [case for case in CASES if "bomb" in case[0] or "says" in case[0] or "frames" in case[0]])
    assert resident() - before < MAX_GROWTH_BYTES
    assert ask(client, good)[0].status_code == 200
