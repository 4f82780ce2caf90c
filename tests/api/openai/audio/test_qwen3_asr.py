"""Qwen3-ASR behind the endpoints of transcription: its own prompt, over a scripted engine and a real one, which
transformers judges; what it cannot do is refused by name."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch

from app.api.server.app import create_app
from app.config.engine import EngineConfig
from app.config.limits import RequestLimits
from app.media.reader import MediaReader
from app.records.media import MediaAsk
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.records.step import TokenLogprobs
from app.text.chat_speech import ChatSpeech
from app.text.model_media import ModelMedia
from app.text.served_model import ServedModel
from tests import limits
from tests.api.conftest import ScriptedClient, Server, served
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.api.openai.audio.test_realtime import events, say, sound
from tests.media.audio.sounds import RATE, file_of, noise, whole_numbers
from tests.media.media_model import reader as make_reader
from tests.media.sound_model import SOUND, write_talk
from tests.offline.test_sounds import heard
from tests.tiny_hearing import MELS, hearing_model, judge_of, told

URL, MARK = "/v1/audio/transcriptions", "<asr_text>"
BEFORE = "<|im_start|>user\n<|audio_start|>"
BEHIND = "<|audio_end|><|im_end|>\n<|im_start|>assistant\n"
HALF = file_of(noise(0.5))
# Longer than is heard at once, as the tests have it: three pieces.
LONG = file_of(np.concatenate([noise(0.9, seed=i) * (i % 2) for i in range(1, 6)]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("asr") / "qwen3_asr"
    path.mkdir()
    for file in hearing_model("qwen3_asr").iterdir():
        (path / file.name).symlink_to(file)
    write_talk(path, "qwen3_asr", {"feature_size": MELS})
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_tokens([MARK])  # as published: not a special one
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def reader() -> Iterator[MediaReader]:
    found = make_reader(max_decoders=1)
    yield found
    found.close()


def hearing(model: ServedModel, reader: MediaReader) -> ServedModel:
    model.media = ModelMedia.of(model.info, model.tokenizer, reader, EngineConfig())
    model.chat_speech = ChatSpeech.of(model.info, model.media, model.chat_template, model.tokenizer)
    assert model.chat_speech is not None
    return model


class Listener(ScriptedClient):
    """Says a language where an answer is to begin with one, and a text behind it."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self.model = model
        self.hears: Callable[[EngineRequest], str] = lambda request: "German"
        self.says = "Hallo Welt"
        self.answers: Callable[[EngineRequest], str] = lambda request: f"language {self.hears(request)}{MARK}"

    def ids(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text, add_special_tokens=False)

    def prompt_of(self, request: EngineRequest) -> str:
        kept = [token for token in request.prompt_token_ids if token != SOUND]
        return self.model.tokenizer.decode(kept, False)

    def _outputs(self, model: ServedModel, request: EngineRequest) -> Iterator[EngineOutput]:
        ask = request.asked(MediaAsk)
        assert ask is not None
        (item,) = ask.items
        assert request.prompt_token_ids[item.offset : item.offset + item.length] == [SOUND] * item.length
        is_asked = not self.prompt_of(request).endswith(MARK)
        text = self.answers(request) if is_asked else self.says
        tokens = self.ids(text) + ([] if is_asked else [self.model.info.eos_token_ids[0]])
        for start in range(0, len(tokens), 3):
            part = tokens[start : start + 3]
            logprobs = [TokenLogprobs([token, 7], [-0.1, -9.0], [1, 2]) for token in part]
            reason = "stop" if start + 3 >= len(tokens) else None
            yield EngineOutput(request.request_id, part, reason, logprobs=logprobs)


@pytest.fixture
def client(directory: Path, reader: MediaReader) -> Listener:
    return Listener(hearing(served(directory, "asr"), reader))


@pytest.fixture
def http(client: Listener, http_to: Callable[[Any], httpx.Client]) -> httpx.Client:
    return http_to(create_app(client, RequestLimits()))


def post(http: httpx.Client, data: bytes = HALF, **fields: Any) -> Any:
    return http.post(URL, data={"model": "asr", **fields}, files={"file": data})


def test_its_own_prompt(client: Listener, http: httpx.Client) -> None:
    answer = post(http, language="de", prompt="Ada, <|im_end|>and [<|audio_pad|>]", temperature="0.3")
    assert answer.json() == {"text": "Hallo Welt", "usage": {"type": "duration", "seconds": 1}}
    (request,) = client.requests
    said = "<|im_start|>system\nAda, and []<|im_end|>\n"
    assert client.prompt_of(request) == f"{said}{BEFORE}{BEHIND}language German{MARK}"
    assert request.sampling.temperature == 0.3
    for name in ("german", "German", "DE"):
        assert post(http, language=name).json()["text"] == "Hallo Welt"
        assert client.prompt_of(client.requests[-1]) == f"{BEFORE}{BEHIND}language German{MARK}"


def test_the_language_is_found_out_once(client: Listener, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_text_is_kept_whatever_its_language(client: Listener, http: httpx.Client) -> None:
    client.hears = lambda request: "Ukrainian"  # none of those that may be given
    assert post(http).json()["text"] == "Hallo Welt"
    assert client.prompt_of(client.requests[-1]) == f"{BEFORE}{BEHIND}language Ukrainian{MARK}"
    client.answers = lambda request: "nothing but text"
    assert post(http).json()["text"] == "nothing but text"
    assert client.prompt_of(client.requests[-1]) == f"{BEFORE}{BEHIND}"


def test_usage_of_silence_is_what_was_asked(client: Listener, http: httpx.Client) -> None:
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


def test_streams_and_usage(client: Listener, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
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
    client: Listener, http: httpx.Client, fields: dict[str, str], param: str, says: str
) -> None:
    answer = post(http, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]
    assert client.requests == []


def test_it_does_not_translate_and_still_chats(client: Listener, http: httpx.Client) -> None:
    answer = http.post("/v1/audio/translations", data={"model": "asr"}, files={"file": HALF})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the model does not translate")
    assert client.model.input_modalities == ("text", "audio")
    assert client.requests == []


def test_it_hears_while_it_is_said(client: Listener, http_to: Callable[[Any], httpx.Client]) -> None:
    heard_as = {"model": "asr", "language": "de", "prompt": "Ada"}
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
    engine = EngineInThisProcess(str(directory), dtype="float32", max_model_len=128)
    (model,) = engine.models.values()
    hearing(model, reader)
    model.max_model_len = 128
    wave, tokenizer = noise(0.5, seed=7), model.tokenizer
    seen = told("qwen3_asr", [heard("qwen3_asr", whole_numbers(wave[:, 0]).astype(np.float32) / 32_768)])
    placeholder = tokenizer.id_to_token(SOUND)
    assert placeholder is not None
    count = len(tokenizer.encode(placeholder * 7, False))  # half a second
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": limits.patience_s()}
    with Server(create_app(engine, RequestLimits())) as server:
        transport = openai.DefaultHttpxClient(verify=False)
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", http_client=transport, **own)
        file = io.BytesIO(file_of(wave))
        file.name = "a.wav"
        found = sdk.audio.transcriptions.create(file=file, model=str(directory), language="en", response_format="json")
    engine.engine.shutdown()
    prompt = tokenizer.encode(f"{BEFORE}{placeholder * count}{BEHIND}language English{MARK}", False)
    said: list[int] = []
    while len(prompt) + len(said) < 128:
        ids = torch.tensor([prompt + said])
        with torch.inference_mode():
            logits = judge_of("qwen3_asr")(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **seen)
        said.append(int(logits.logits[0, -1].argmax()))
        if said[-1] in model.info.eos_token_ids:
            break
    special = {*tokenizer.special_token_ids, tokenizer.token_to_id(MARK), model.info.eos_token_ids[0]}
    assert found.text == tokenizer.decode([token for token in said if token not in special], True).strip()
    assert len(said) > 3
    assert RATE == 16_000
