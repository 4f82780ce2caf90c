"""Qwen3-ASR behind the endpoints of transcription: its own prompt, over a scripted engine and a real one, which
transformers judges; what it cannot do is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.media.reader import MediaReader
from app.records.media import MediaAsk
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.step import TokenLogprobs
from tests import limits
from tests.api.conftest import served
from tests.api.openai.audio.listening_chat import (
    HALF,
    LONG,
    NAME,
    Listener,
    check_text,
    hearing,
    post,
    write_listener,
)
from tests.api.openai.audio.test_realtime import events, say, sound
from tests.media.media_model import reader as make_reader
from tests.media.sound_model import SOUND

MARK = "<asr_text>"  # as published: not a special token
BEFORE = "<|im_start|>user\n<|audio_start|>"
BEHIND = "<|audio_end|><|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_listener(tmp_path_factory.mktemp("asr") / "qwen3_asr", "qwen3_asr", [MARK], are_special=False)


@pytest.fixture(scope="module")
def reader() -> Iterator[MediaReader]:
    found = make_reader(max_decoders=1)
    yield found
    found.close()


class Qwen(Listener):
    """Says a language where an answer is to begin with one, and a text behind it."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.hears: Callable[[EngineRequest], str] = lambda request: "German"
        self.says = "Hallo Welt"
        self.answers: Callable[[EngineRequest], str] = lambda request: f"language {self.hears(request)}{MARK}"

    def answer(self, request: EngineRequest) -> Iterator[EngineOutput]:
        is_asked = not self.prompt_of(request).endswith(MARK)
        text = self.answers(request) if is_asked else self.says
        tokens = self.ids(text) + ([] if is_asked else [self.model.info.eos_token_ids[0]])
        for start in range(0, len(tokens), 3):
            part = tokens[start : start + 3]
            logprobs = [TokenLogprobs([token, 7], [-0.1, -9.0], [1, 2]) for token in part]
            reason = "stop" if start + 3 >= len(tokens) else None
            yield EngineOutput(request.request_id, part, reason, logprobs=logprobs)


@pytest.fixture
def client(directory: Path, reader: MediaReader) -> Qwen:
    return Qwen(hearing(served(directory, NAME), reader))


@pytest.fixture
def http(client: Qwen, http_to: Callable[[Any], httpx.Client]) -> httpx.Client:
    return http_to(create_app(client, RequestLimits()))


def test_its_own_prompt(client: Qwen, http: httpx.Client) -> None:
    answer = post(http, language="de", prompt="Ada, <|im_end|>and [<|audio_pad|>]", temperature="0.3")
    assert answer.json() == {"text": "Hallo Welt", "usage": {"type": "duration", "seconds": 1}}
    (request,) = client.requests
    said = "<|im_start|>system\nAda, and []<|im_end|>\n"
    assert client.prompt_of(request) == f"{said}{BEFORE}{BEHIND}language German{MARK}"
    assert request.sampling.temperature == 0.3
    for name in ("german", "German", "DE"):
        assert post(http, language=name).json()["text"] == "Hallo Welt"
        assert client.prompt_of(client.requests[-1]) == f"{BEFORE}{BEHIND}language German{MARK}"


def test_the_language_is_found_out_once(client: Qwen, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.text.chat_speech.PIECE_S", 2.0)
    assert post(http, LONG).json()["text"] == "Hallo Welt Hallo Welt Hallo Welt"
    prompts = [client.prompt_of(request) for request in client.requests]
    assert sorted(prompts) == sorted([f"{BEFORE}{BEHIND}", *[f"{BEFORE}{BEHIND}language German{MARK}"] * 3])
    client.hears = lambda request: "Chinese"
    assert post(http, LONG).json()["text"] == "Hallo WeltHallo WeltHallo Welt"  # no spaces between its texts
    client.hears = lambda request: "None"
    assert post(http, LONG).json()["text"] == ""
    begins = len(client.requests)
    first: list[bytes] = []

    def second_speaks(request: EngineRequest) -> str:
        (item,) = request.asked(MediaAsk).items  # type: ignore[union-attr]
        first.append(item.digest)
        return "None" if item.digest == first[0] else "German"

    client.hears = second_speaks
    assert post(http, LONG).json()["text"] == "Hallo Welt Hallo Welt"
    assert len(client.requests) - begins == 2 + 2  # the second told the language to the third
    prompts = [client.prompt_of(request) for request in client.requests[begins:]]
    assert sorted(prompts) == sorted([f"{BEFORE}{BEHIND}", f"{BEFORE}{BEHIND}language German{MARK}"] * 2)


def test_a_text_is_kept_whatever_its_language(client: Qwen, http: httpx.Client) -> None:
    client.hears = lambda request: "Ukrainian"  # none of those that may be given
    assert post(http).json()["text"] == "Hallo Welt"
    assert client.prompt_of(client.requests[-1]) == f"{BEFORE}{BEHIND}language Ukrainian{MARK}"
    client.answers = lambda request: "nothing but text"
    assert post(http).json()["text"] == "nothing but text"
    assert client.prompt_of(client.requests[-1]) == f"{BEFORE}{BEHIND}"


def test_usage_of_silence_is_what_was_asked(client: Qwen, http: httpx.Client) -> None:
    client.hears = lambda request: "None"
    answer = post(http, stream="true")
    done = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")][-1]
    (request,) = client.requests
    heard, whole = request.prompt_token_ids.count(SOUND), len(request.prompt_token_ids)
    said = len(client.ids(f"language None{MARK}"))
    assert heard > 0
    assert (done["text"], done["usage"]) == (
        "",
        {
            "type": "tokens",
            "input_tokens": whole,
            "input_token_details": {"audio_tokens": heard, "text_tokens": whole - heard},
            "output_tokens": said,
            "total_tokens": whole + said,
        },
    )


def test_streams_and_usage(client: Qwen, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.text.chat_speech.PIECE_S", 2.0)
    answer = post(http, LONG, stream="true", **{"include[]": "logprobs"})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    *deltas, done = events
    assert "".join(event["delta"] for event in deltas) == done["text"] == "Hallo Welt Hallo Welt Hallo Welt"
    assert len(deltas) > 3
    assert b"".join(bytes(one["bytes"]) for one in done["logprobs"]) == b"Hallo Welt" * 3
    texts = [request for request in client.requests if client.prompt_of(request).endswith(MARK)]
    heard = sum(request.prompt_token_ids.count(SOUND) for request in texts)
    whole = sum(len(request.prompt_token_ids) for request in texts)
    details = {"audio_tokens": heard, "text_tokens": whole - heard}
    usage = done["usage"]
    assert heard > 0
    assert (usage["input_tokens"], usage["input_token_details"]) == (whole, details)
    assert usage["output_tokens"] == 3 * (len("Hallo Welt") + 1)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": "srt"}, "response_format", "tells no times"),
        ({"response_format": "vtt"}, "response_format", "tells no times"),
        ({"response_format": "verbose_json"}, "response_format", "tells no times"),
        (
            {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
            "timestamp_granularities",
            "tells no times of words",
        ),
        ({"language": "tlh"}, "language", "hears no language 'tlh'; it knows ar, cs"),
    ],
)
def test_what_it_cannot_do_is_named(
    client: Qwen, http: httpx.Client, fields: dict[str, str], param: str, says: str
) -> None:
    answer = post(http, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]
    assert client.requests == []


def test_it_does_not_translate_and_still_chats(client: Qwen, http: httpx.Client) -> None:
    answer = http.post("/v1/audio/translations", data={"model": NAME}, files={"file": HALF})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the model does not translate")
    assert client.model.input_modalities == ("text", "audio")
    assert client.requests == []


def test_it_hears_while_it_is_said(client: Qwen, http_to: Callable[[Any], httpx.Client]) -> None:
    heard_as = {"model": NAME, "language": "de", "prompt": "Ada"}
    own: Any = {"type": "transcription", "audio": {"input": {"turn_detection": None, "transcription": heard_as}}}
    options: Any = {"open_timeout": limits.patience_s(), "proxy": None}
    base = f"{http_to(create_app(client, RequestLimits())).base_url}/v1"
    with (
        openai.OpenAI(base_url=base, api_key="none", max_retries=0) as sdk,
        sdk.realtime.connect(extra_query={}, websocket_connection_options=options) as connection,
    ):
        connection.session.update(session=own)
        say(connection, sound(0.6, seed=1))
        connection.input_audio_buffer.commit()
        done = events(connection, "conversation.item.input_audio_transcription.completed")[-1]
    assert done.transcript == "Hallo Welt"
    (request,) = client.requests
    said = "<|im_start|>system\nAda<|im_end|>\n"
    assert client.prompt_of(request) == f"{said}{BEFORE}{BEHIND}language German{MARK}"


def test_tokens_are_those_of_transformers(directory: Path, reader: MediaReader) -> None:
    """A file of one piece, its language given and found out; the random model says any of its 331 tokens."""
    of_half_a_second = 7
    behind = f"{BEHIND}language English{MARK}"
    check_text(directory, reader, "qwen3_asr", BEFORE, behind, of_half_a_second, [MARK])
