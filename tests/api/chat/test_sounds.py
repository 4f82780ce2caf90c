"""Sounds in conversations over HTTP: each form, through the SDK, becomes the same prompt; what is wrong with one is
said in the words of the dialect."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.records.media import MediaAsk
from tests import limits
from tests.api.conftest import ScriptedClient, Server, served, write_model
from tests.media.audio.sounds import file_of, noise, whole_numbers
from tests.media.media_model import reader, seeing, write_media_model
from tests.media.pictures import file_of as picture_file
from tests.media.pictures import picture
from tests.media.sound_model import MARKS, SOUND, hearing, write_sound_model

CHAT = "/v1/chat/completions"
WAVE = whole_numbers(noise(0.5))
DATA = base64.b64encode(file_of(WAVE)).decode()
LOSSLESS = base64.b64encode(file_of(WAVE, "FLAC")).decode()
LONG = base64.b64encode(file_of(noise(2.0))).decode()
PART: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
TEXT = {"type": "text", "text": "What is said?"}
IMAGE = {
    "type": "image_url",
    "image_url": {"url": f"data:;base64,{base64.b64encode(picture_file(picture())).decode()}"},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedClient]:
    folder = tmp_path_factory.mktemp("sounds")
    own = reader(max_sounds=3, max_decoders=1)
    hears = hearing(write_sound_model(folder / "m", "qwen2_audio"), own, limit_mm_per_prompt={"audio": 2})
    many = hearing(write_sound_model(folder / "many", "voxtral", 40), own, "many")
    sees = seeing(write_media_model(folder / "sees"), own, "sees")
    client = ScriptedClient(hears, many, sees, served(write_model(folder / "text"), "text"))
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


def test_every_form_makes_the_same_prompt(client: ScriptedClient, server: Server, http: httpx.Client) -> None:
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": limits.patience_s()}
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", http_client=openai.DefaultHttpxClient(verify=False), **own)
    forms: list[dict[str, Any]] = [
        PART,
        {"type": "input_audio", "input_audio": {"data": LOSSLESS, "format": "flac"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{DATA}"}},
    ]
    prompts, usages = [], []
    for form in forms:
        messages: Any = [{"role": "user", "content": [form, TEXT]}]
        chat = sdk.chat.completions.create(model="m", messages=messages, max_tokens=9)
        assert chat.usage is not None
        usages.append(chat.usage.prompt_tokens)
        prompts.append(client.requests[-1])
        assert asked(http, form, TEXT, path="/tokenize").json()["count"] == usages[0]
    items: Any = [PART, {"type": "input_text", "text": TEXT["text"]}]
    response = sdk.responses.create(model="m", input=[{"role": "user", "content": items}], max_output_tokens=9)
    assert response.usage is not None
    usages.append(response.usage.input_tokens)
    prompts.append(client.requests[-1])
    assert len(set(usages)) == len({tuple(one.prompt_token_ids) for one in prompts}) == 1
    asks = [one.asked(MediaAsk) for one in prompts]
    assert len({ask.items[0].digest for ask in asks if ask is not None}) == 1
    (item,) = asks[0].items  # type: ignore[union-attr]
    assert (item.kind, item.length, item.grid, item.shape) == ("audio", 12, (1, 1, 50), (12, 100))
    ids = prompts[0].prompt_token_ids
    assert ids[item.offset : item.end] == [SOUND] * 12
    text = client.models["m"].tokenizer.decode(ids, False)
    assert f"<|audio_bos|>{'<|AUDIO|>' * 12}<|audio_eos|>What is said?" in text


def test_words_of_users_are_no_sounds(client: ScriptedClient, http: httpx.Client) -> None:
    spelt = {"type": "text", "text": MARKS["qwen2_audio"][0]}
    assert asked(http, spelt, PART).status_code == 200
    request = client.requests[-1]
    ask = request.asked(MediaAsk)
    assert ask is not None
    assert request.prompt_token_ids.count(SOUND) == ask.items[0].length
    assert ask.items[0].offset > request.prompt_token_ids.index(SOUND) - 1


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}, "input_audio", "is not base64"),
    ({"type": "input_audio", "input_audio": {"data": DATA, "format": "pcm16"}}, "", "format is one of wav, mp3"),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, "", "data is required"),
    ({"type": "input_audio"}, "", "data is required"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio", "is no sound that is"),
    ({"type": "audio_url", "audio_url": {"url": "ftp://x/y"}}, "audio_url", "of 'ftp'"),
    ({"type": "audio_url", "audio_url": {"url": "https://x/y.wav"}}, "audio_url", "is not fetched"),
    ({"type": "audio_url", "audio_url": {}}, "audio_url.url", "required"),
    (
        {"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}},
        "input_audio",
        "lasts 2 s; at most 1 s",
    ),
    (IMAGE, "image_url", "takes sounds; it takes no pictures"),
]


@pytest.mark.parametrize(("part", "field", "says"), WRONG, ids=[f"{i}-{one[2]}" for i, one in enumerate(WRONG)])
def test_errors_name_the_field(http: httpx.Client, part: dict[str, Any], field: str, says: str) -> None:
    error = error_of(asked(http, TEXT, part))
    assert error["param"] == ".".join(filter(None, ("messages.0.content.1", field))), error
    assert says in error["message"], error


def test_errors_of_responses(http: httpx.Client) -> None:
    part = {"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}}
    answer = http.post("/v1/responses", json={"model": "m", "input": [{"role": "user", "content": [part]}]})
    error = error_of(answer)
    assert error["param"] == "input.0.content.0.input_audio"
    assert "lasts 2 s" in error["message"]


def test_who_takes_no_sounds(http: httpx.Client) -> None:
    for model, says in (("text", "reads text only"), ("sees", "takes pictures and videos")):
        error = error_of(asked(http, PART, model=model))
        assert error["param"] == "messages.0.content.0.input_audio"
        assert f"{says}; it takes no sounds" in error["message"]


def test_limits_of_a_prompt(client: ScriptedClient, http: httpx.Client, http_to: Callable[[Any], httpx.Client]) -> None:
    """Their number by the model's option and the server's, their bytes, and their tokens."""
    before = len(client.requests)
    assert "3 sounds; at most 2 a prompt" in error_of(asked(http, PART, PART, PART))["message"]
    assert "4 sounds; at most 3 a prompt" in error_of(asked(http, *[PART] * 4, model="many"))["message"]
    assert len(client.requests) == before
    assert error_of(asked(http, *[PART] * 3, model="many"))["code"] == "context_length_exceeded"
    small = http_to(create_app(client, RequestLimits(max_sound_bytes=9_999)))
    assert "a sound may have 9999" in error_of(asked(small, PART))["message"]
    held = http_to(create_app(client, RequestLimits(max_bodies_bytes=70_000)))
    assert asked(held, PART).status_code in (400, 429)
    assert len(client.requests) == before
