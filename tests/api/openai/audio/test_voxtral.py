"""Voxtral behind the endpoints of transcription: its own prompt over a scripted engine, and its text by a real one,
which transformers judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.media.reader import MediaReader
from app.records.outputs import EngineOutput
from app.records.request import EngineRequest
from tests.api.conftest import served
from tests.api.openai.audio.listening_chat import LONG, NAME, Listener, check_text, hearing, post, write_listener
from tests.media.media_model import reader as make_reader
from tests.tiny_hearing import HEARING

MARKS = ("<s>", "[INST]", "[/INST]", "[TRANSCRIBE]")
BEFORE, BEHIND = "<s>[INST][BEGIN_AUDIO]", "[/INST]"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_listener(tmp_path_factory.mktemp("transcribes") / "voxtral", "voxtral", MARKS, are_special=True)


@pytest.fixture(scope="module")
def reader() -> Iterator[MediaReader]:
    found = make_reader(max_decoders=1)
    yield found
    found.close()


class Voxtral(Listener):
    """Says a text of whatever it hears."""

    def answer(self, request: EngineRequest) -> Iterator[EngineOutput]:
        yield EngineOutput(request.request_id, [*self.ids("Bonjour"), self.model.info.eos_token_ids[0]], "stop")


@pytest.fixture
def client(directory: Path, reader: MediaReader) -> Voxtral:
    return Voxtral(hearing(served(directory, NAME), reader))


@pytest.fixture
def http(client: Voxtral, http_to: Callable[[Any], httpx.Client]) -> httpx.Client:
    return http_to(create_app(client, RequestLimits()))


def test_its_own_prompt(client: Voxtral, http: httpx.Client) -> None:
    """Without a language nothing is asked before the text."""
    for language, told_as in ((None, ""), ("fr", "lang:fr"), ("French", "lang:fr")):
        fields = {} if language is None else {"language": language}
        assert post(http, **fields).json()["text"] == "Bonjour"
        assert client.prompt_of(client.requests[-1]) == f"{BEFORE}{BEHIND}{told_as}[TRANSCRIBE]"
    assert len(client.requests) == 3


def test_pieces_side_by_side(client: Voxtral, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
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
    client: Voxtral, http: httpx.Client, fields: dict[str, str], param: str, says: str
) -> None:
    answer = post(http, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert says in answer.json()["error"]["message"]
    assert client.requests == []


def test_tokens_are_those_of_transformers(directory: Path, reader: MediaReader) -> None:
    of_a_window = HEARING["voxtral"].layout(1)[2]
    check_text(directory, reader, "voxtral", BEFORE, f"{BEHIND}lang:en[TRANSCRIBE]", of_a_window, ())
