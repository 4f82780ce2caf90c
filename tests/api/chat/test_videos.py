"""Videos in conversations over HTTP: fetched or as data, through the SDK and in batches; usage counts them; what is
wrong with one is said of its field."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from app.api.chat import media
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.records.media import MediaAsk, MediaKind
from app.text.prompt_size import TextRoom
from tests import limits
from tests.api.conftest import ScriptedClient, Server, served, write_model
from tests.api.picture_table import ONE
from tests.media.media_model import END, PAD, START, VIDEO, reader, seeing, write_media_model
from tests.media.pictures import file_of as picture_file
from tests.media.pictures import picture
from tests.media.sound_model import hearing, write_sound_model
from tests.media.videos.clips import file_of, frames

CHAT = "/v1/chat/completions"
FIELD = "messages.0.content.0.video_url"
SMALL = f"data:image/png;base64,{base64.b64encode(picture_file(picture(8, 8))).decode()}"
TEXT = {"type": "text", "text": "What happens?"}


def url_of(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


FILE = file_of(frames(24))
URL = url_of(FILE)
PART: dict[str, Any] = {"type": "video_url", "video_url": {"url": URL}}
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": ONE}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedClient]:
    folder = tmp_path_factory.mktemp("videos")
    own = reader(max_videos=2, max_decoders=1, max_video_bytes=len(FILE) + 99)
    older = seeing(write_media_model(folder / "m"), own)
    newer = seeing(write_media_model(folder / "newer", kind="qwen3_vl"), own, "newer")
    few = seeing(
        write_media_model(folder / "few", 40), own, "few",
        limit_mm_per_prompt={"video": 1}, mm_processor_kwargs={"num_frames": 2},
    )  # fmt: skip
    hears = hearing(write_sound_model(folder / "hears", "qwen2_audio"), own, "hears")
    client = ScriptedClient(older, newer, few, hears, served(write_model(folder / "text"), "text"))
    client.script = lambda request: [40, 41]
    yield client
    own.close()


@pytest.fixture(scope="module")
def server(client: ScriptedClient) -> Iterator[Server]:
    with Server(create_app(client, RequestLimits())) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=limits.patience_s(), verify=False) as http:
        yield http


def asked(http: httpx.Client, *parts: Any, model: str = "m", path: str = CHAT) -> httpx.Response:
    return http.post(path, json={"model": model, "messages": [{"role": "user", "content": list(parts)}]})


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_video_is_a_prompt_s_part(client: ScriptedClient, server: Server, http: httpx.Client) -> None:
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": limits.patience_s()}
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", http_client=openai.DefaultHttpxClient(verify=False), **own)
    messages: Any = [{"role": "user", "content": [PART, IMAGE, TEXT]}]
    chat = sdk.chat.completions.create(model="m", messages=messages, max_tokens=9)
    request = client.requests[-1]
    ask = request.asked(MediaAsk)
    assert ask is not None
    video, image = ask.items
    assert (video.kind, video.grid, image.kind) == ("video", (3, 4, 4), "image")
    tokenizer = client.models["m"].tokenizer
    text = tokenizer.decode(request.prompt_token_ids, False)
    assert f"{START}{VIDEO * 12}{END}{START}{PAD * 6}{END}What happens?" in text
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(request.prompt_token_ids)
    assert asked(http, PART, IMAGE, TEXT, path="/tokenize").json()["count"] == len(request.prompt_token_ids)
    plain = {"type": "video_url", "video_url": URL}
    assert asked(http, plain, IMAGE, TEXT).status_code == 200
    assert client.requests[-1].prompt_token_ids == request.prompt_token_ids
    batch = http.post(f"{CHAT}/batch", json={"model": "m", "messages": [messages, messages]})
    assert batch.status_code == 200, batch.text
    assert {one.asked(MediaAsk).items[0].digest for one in client.requests[-2:]} == {video.digest}  # type: ignore[union-attr]


def test_the_newer_say_when_each_frame_was(client: ScriptedClient, http: httpx.Client) -> None:
    """And the marks that the template wrote around all of it are each frame's."""
    assert asked(http, TEXT, PART, model="newer").status_code == 200
    request = client.requests[-1]
    text = client.models["newer"].tokenizer.decode(request.prompt_token_ids, False)
    shown = "".join(f"<{second} seconds>{START}{VIDEO * 4}{END}" for second in ("0.3", "1.4", "2.6"))
    assert f"What happens?{shown}<|im_end|>" in text
    (item,) = request.asked(MediaAsk).items  # type: ignore[union-attr]
    own = client.models["newer"].tokenizer.decode(request.prompt_token_ids[item.offset : item.end], False)
    assert own == shown


def test_words_of_users_are_no_videos(client: ScriptedClient, http: httpx.Client) -> None:
    assert asked(http, {"type": "text", "text": f"{VIDEO} {START}{VIDEO}{END}"}, PART, model="newer").status_code == 200
    request = client.requests[-1]
    video = client.models["newer"].tokenizer.token_to_id(VIDEO)
    (item,) = request.asked(MediaAsk).items  # type: ignore[union-attr]
    assert request.prompt_token_ids.index(video) > item.offset


def test_a_video_is_fetched_within_its_own_bounds(
    client: ScriptedClient, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[Any] = []

    async def fetch(url: str, hold: Callable[[int], None], kind: str, max_bytes: int) -> bytes:
        asked_for.append((url, kind, max_bytes))
        hold(len(FILE))
        return FILE

    media = client.models["m"].media
    assert media is not None
    monkeypatch.setattr(media.reader, "fetch", fetch)
    url = "https://videos.example/a.mp4"
    assert asked(http, {"type": "video_url", "video_url": {"url": url}}, IMAGE, TEXT).status_code == 200
    assert asked_for == [(url, "video", len(FILE) + 99)]
    ask = client.requests[-1].asked(MediaAsk)
    assert ask is not None
    assert [item.kind for item in ask.items] == ["video", "image"]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, FIELD, "is no video that is known"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4"}}, FIELD, "no comma before the video"),
    ({"type": "video_url", "video_url": {"url": "file:///etc/passwd"}}, FIELD, "is no data URL and none of http"),
    ({"type": "video_url", "video_url": {"url": "https://videos.example/a.mp4"}}, FIELD, "is not fetched"),
    ({"type": "video_url", "video_url": {"url": SMALL}}, FIELD, "is a picture, which is not read; mp4, mov, webm"),
    ({"type": "video_url", "video_url": {}}, "messages.0.content.0.video_url.url", "required"),
    ({"type": "video_url"}, "messages.0.content.0.video_url", "required"),
]


@pytest.mark.parametrize(("part", "field", "says"), WRONG)
def test_what_is_wrong_is_said(http: httpx.Client, part: dict[str, Any], field: str, says: str) -> None:
    error = error_of(asked(http, part))
    assert field in (error["param"] or error["message"]), error
    assert says.lower() in error["message"].lower()


def test_other_models_refuse_it_by_name(http: httpx.Client) -> None:
    for model, says in (("text", "reads text only"), ("hears", "takes sounds")):
        error = error_of(asked(http, PART, model=model))
        assert error["param"] == FIELD
        assert f"{says}; it takes no videos" in error["message"]


def test_limits_of_a_prompt(client: ScriptedClient, http: httpx.Client) -> None:
    error = error_of(asked(http, PART, PART, PART))
    assert (error["param"], "3 videos; at most 2 a prompt" in error["message"]) == (
        "messages.0.content.2.video_url",
        True,
    )
    error = error_of(asked(http, PART, IMAGE, PART, model="few"))
    assert "2 videos; at most 1 a prompt" in error["message"]
    error = error_of(asked(http, {"type": "video_url", "video_url": {"url": url_of(FILE + bytes(200))}}))
    assert f"bytes; a video may have {len(FILE) + 99}" in error["message"]
    assert asked(http, PART, model="few").status_code == 200
    assert client.requests[-1].asked(MediaAsk).items[0].grid[0] == 1  # type: ignore[union-attr]


def test_a_request_has_one_video_decoded_at_a_time() -> None:
    """Pictures beside it are decoded meanwhile; videos come in their order."""
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def run(call: Any, kind: MediaKind, data: bytes, *_: Any) -> bytes:
        running[kind] += 1
        most[kind] = max(most[kind], running[kind])
        await asyncio.sleep(0)
        running[kind] -= 1
        return data

    fakes: Any = SimpleNamespace(run_process=run, run_long_process=run, tenant="t")
    model: Any = SimpleNamespace(read="read")
    memory: Any = SimpleNamespace(add_values=lambda picture: None)
    kinds: list[MediaKind] = ["video", "image", "video", "image", "video"]
    shown = [media._Shown(f"f{i}", bytes([i]), kind, "auto") for i, kind in enumerate(kinds)]
    found = asyncio.run(media._all_read(fakes, model, memory, shown, TextRoom(100)))
    assert found == [bytes([i]) for i in range(5)]
    assert most == {"video": 1, "image": 2}
