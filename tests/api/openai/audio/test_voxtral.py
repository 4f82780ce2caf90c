"""Voxtral behind the endpoints of transcription: its own prompt over a scripted engine, and its text by a real one,
which transformers judges."""

from __future__ import annotations

import io
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
from app.config.limits import RequestLimits
from app.media.reader import MediaReader
from app.records.media import MediaAsk
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from app.text.served_model import ServedModel
from tests import limits
from tests.api.conftest import ScriptedClient, Server, served
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.api.openai.audio.test_qwen3_asr import hearing
from tests.media.audio.sounds import file_of, noise, whole_numbers
from tests.media.media_model import reader as make_reader
from tests.media.sound_model import SOUND, write_talk
from tests.offline.test_sounds import heard
from tests.tiny_hearing import HEARING, MELS, hearing_model, judge_of, told

URL, MARKS = "/v1/audio/transcriptions", ["<s>", "[INST]", "[/INST]", "[TRANSCRIBE]"]
BEFORE, BEHIND = "<s>[INST][BEGIN_AUDIO]", "[/INST]"
HALF = file_of(noise(0.5))
LONG = file_of(np.concatenate([noise(0.9, seed=i) * (i % 2) for i in range(1, 6)]))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("transcribes") / "voxtral"
    path.mkdir()
    for file in hearing_model("voxtral").iterdir():
        (path / file.name).symlink_to(file)
    write_talk(path, "voxtral", {"feature_size": MELS})
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(MARKS)
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def reader() -> Iterator[MediaReader]:
    found = make_reader(max_decoders=1)
    yield found
    found.close()


class Listener(ScriptedClient):
    """Says a text of whatever it hears."""

    def __init__(self, model: ServedModel) -> None:
        super().__init__(model)
        self.model = model

    def prompt_of(self, request: EngineRequest) -> str:
        kept = [token for token in request.prompt_token_ids if token != SOUND]
        return self.model.tokenizer.decode(kept, False)

    def _outputs(self, model: ServedModel, request: EngineRequest) -> Iterator[EngineOutput]:
        ask = request.asked(MediaAsk)
        assert ask is not None
        (item,) = ask.items
        assert request.prompt_token_ids[item.offset : item.offset + item.length] == [SOUND] * item.length
        tokens = model.tokenizer.encode("Bonjour", add_special_tokens=False)
        yield EngineOutput(request.request_id, [*tokens, model.info.eos_token_ids[0]], "stop")


@pytest.fixture
def client(directory: Path, reader: MediaReader) -> Listener:
    return Listener(hearing(served(directory, "voxtral"), reader))


@pytest.fixture
def http(client: Listener, http_to: Callable[[Any], httpx.Client]) -> httpx.Client:
    return http_to(create_app(client, RequestLimits()))


def post(http: httpx.Client, data: bytes = HALF, **fields: Any) -> Any:
    return http.post(URL, data={"model": "voxtral", **fields}, files={"file": data})


def test_its_own_prompt(client: Listener, http: httpx.Client) -> None:
    """Without a language nothing is asked before the text."""
    for language, told_as in ((None, ""), ("fr", "lang:fr"), ("French", "lang:fr")):
        fields = {} if language is None else {"language": language}
        assert post(http, **fields).json()["text"] == "Bonjour"
        assert client.prompt_of(client.requests[-1]) == f"{BEFORE}{BEHIND}{told_as}[TRANSCRIBE]"
    assert len(client.requests) == 3


def test_pieces_side_by_side(client: Listener, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.text.chat_speech.PIECE_S", 2.0)
    assert post(http, LONG).json()["text"] == "Bonjour Bonjour Bonjour"
    assert {client.prompt_of(request) for request in client.requests} == {f"{BEFORE}{BEHIND}[TRANSCRIBE]"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": "Ada"}, "prompt", "takes no text before a sound"),
        ({"response_format": "srt"}, "response_format", "tells no times"),
        ({"language": "tlh"}, "language", "hears no language 'tlh'"),
    ],
)
def test_what_it_cannot_do_is_named(
    client: Listener, http: httpx.Client, fields: dict[str, str], param: str, says: str
) -> None:
    answer = post(http, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert says in answer.json()["error"]["message"]
    assert client.requests == []


def test_tokens_are_those_of_transformers(directory: Path, reader: MediaReader) -> None:
    engine = EngineInThisProcess(str(directory), dtype="float32", max_model_len=128)
    (model,) = engine.models.values()
    hearing(model, reader)
    model.max_model_len = 128
    wave, tokenizer = noise(0.5, seed=7), model.tokenizer
    seen = told("voxtral", [heard("voxtral", whole_numbers(wave[:, 0]).astype(np.float32) / 32_768)])
    own: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": limits.patience_s()}
    with Server(create_app(engine, RequestLimits())) as server:
        transport = openai.DefaultHttpxClient(verify=False)
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", http_client=transport, **own)
        file = io.BytesIO(file_of(wave))
        file.name = "a.wav"
        found = sdk.audio.transcriptions.create(file=file, model=str(directory), language="en", response_format="json")
    engine.engine.shutdown()
    count = HEARING["voxtral"].layout(1)[2]  # of a window
    prompt = tokenizer.encode(f"{BEFORE}{'[AUDIO]' * count}{BEHIND}lang:en[TRANSCRIBE]", False)
    said: list[int] = []
    while len(prompt) + len(said) < 128:
        ids = torch.tensor([prompt + said])
        with torch.inference_mode():
            logits = judge_of("voxtral")(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **seen)
        said.append(int(logits.logits[0, -1].argmax()))
        if said[-1] in model.info.eos_token_ids:
            break
    special = {*tokenizer.special_token_ids, model.info.eos_token_ids[0]}
    assert found.text == tokenizer.decode([token for token in said if token not in special], True).strip()
    assert len(said) > 3
