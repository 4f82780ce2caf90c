"""Videos that are meant to do harm, over HTTP: each is refused by a readable 400 that names its field, or shown, and
memory stays."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache

import httpx
import psutil
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.media.reader import MediaReader
from app.records.media import MediaAsk
from tests import limits
from tests.api.conftest import ScriptedClient
from tests.media.media_model import reader, seeing, write_media_model
from tests.media.videos.hostile import MAX_FRAMES, MAX_PIXELS, MAX_S, Case, cases

FIELD = "messages.0.content.0.video_url"
MAX_GROWTH_BYTES = 200 << 20
made = cache(cases)


@pytest.fixture(scope="module")
def own() -> Iterator[MediaReader]:
    bounds = {"max_video_s": MAX_S, "max_video_frames": MAX_FRAMES, "max_video_pixels": MAX_PIXELS}
    own = reader(cache_bytes=0, max_decoders=1, **bounds)
    yield own
    own.close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, own: MediaReader) -> ScriptedClient:
    return ScriptedClient(seeing(write_media_model(tmp_path_factory.mktemp("hostile") / "m", kind="qwen3_vl"), own))


def ask(client: ScriptedClient, some: list[Case]) -> list[httpx.Response]:
    async def post() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(client, RequestLimits()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            urls = [f"data:video/mp4;base64,{base64.b64encode(data).decode()}" for _, data, _ in some]
            parts = [[{"type": "video_url", "video_url": {"url": url}}] for url in urls]
            bodies = [{"messages": [{"role": "user", "content": part}], "max_tokens": 2} for part in parts]
            return [await http.post("/v1/chat/completions", json=body) for body in bodies]

    return limits.run(post())


def test_each_is_refused_or_a_video(client: ScriptedClient) -> None:
    some = made()
    assert len({name for name, _, _ in some}) == len(some)
    wrong = []
    for (name, _, refused), answer in zip(some, ask(client, some), strict=True):
        if answer.status_code != (400 if refused else 200):
            wrong.append((name, answer.text[:300]))
        elif refused:
            error = answer.json()["error"]
            message = error["message"]
            assert (error["param"], message[: len(FIELD)]) == (FIELD, FIELD), (name, error)
            assert 40 < len(message) < 400, (name, error)
            assert "Traceback" not in message
        else:
            assert client.requests[-1].asked(MediaAsk) is not None, name
    assert wrong == []


def test_memory_stays(client: ScriptedClient) -> None:
    """That of the server and of all that decode for it, over what one good video takes."""

    def resident() -> int:
        own = psutil.Process()
        return int(sum(process.memory_info().rss for process in (own, *own.children())))

    good = [case for case in made() if not case[2]][:1]
    ask(client, good)
    before = resident()
    for _ in range(2):
        ask(client, [case for case in made() if "bomb" in case[0] or "says" in case[0] or "4e9" in case[0]])
    assert resident() - before < MAX_GROWTH_BYTES
    assert ask(client, good)[0].status_code == 200
