"""The example of transcriptions, against a random Whisper behind HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.api.conftest import Server
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.api.openai.audio.speech_model import with_speech, write_speech_model, write_weights
from tests.examples.conftest import RunExample
from tests.media.audio.sounds import file_of, noise


@pytest.fixture(scope="module")
def listening_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = write_speech_model(tmp_path_factory.mktemp("whisper"))
    write_weights(directory)
    client = EngineInThisProcess(str(directory), dtype="float32")
    (model,) = client.models.values()
    with_speech(model)
    with Server(create_app(client, RequestLimits())) as server:
        yield server
    client.engine.shutdown()
    assert model.speech is not None
    model.speech.reader.close()


def test_transcribe(run_here: RunExample, listening_server: Server, tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    file.write_bytes(file_of(noise(1.7, seed=4)))
    printed = run_here("transcribe", str(file), listening_server.url)
    first, *others = printed.splitlines()
    assert re.fullmatch(r"1\.7 s of (english|german|japanese)", first)
    assert re.match(r" +0\.\d\d - +\d\.\d\d ", others[0])
    assert re.search(r"^1\n00:00:0\d,\d{3} --> 00:00:0\d,\d{3}\n", printed, re.M)
    assert re.fullmatch(r"\d+ tokens", others[-1])
