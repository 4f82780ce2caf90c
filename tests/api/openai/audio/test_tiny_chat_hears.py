"""The built-in model that transcribes: phrases that training never said, by a speaker that it never heard, in its own
times; transformers writes the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from app.api.server.app import create_app
from app.checkpoints.built_in import built_in_directory
from app.config.limits import RequestLimits
from tests import limits
from tests.api.conftest import Server
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.api.openai.audio.speech_model import with_speech
from tests.media.audio.sounds import RATE, soundfile

SAID = sorted((Path(__file__).parent / "said").glob("*.ogg"))
NAME = "tiny-chat-hears"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    engine = EngineInThisProcess(NAME, dtype="float32")
    (model,) = engine.models.values()
    speech = with_speech(model).speech
    assert speech is not None
    with (
        Server(create_app(engine, RequestLimits())) as server,
        httpx.Client(base_url=server.url, timeout=limits.patience_s(), verify=False) as http,
    ):
        yield http
    engine.engine.shutdown()
    speech.reader.close()


def transcript(http: httpx.Client, file: Path, form: str) -> httpx.Response:
    return http.post("/v1/audio/transcriptions", data={"response_format": form}, files={"file": file.read_bytes()})


@pytest.mark.parametrize("file", SAID, ids=lambda file: file.stem)
def test_what_is_said_is_written_down(http: httpx.Client, file: Path) -> None:
    said = file.stem.replace("_", " ")
    assert transcript(http, file, "json").json()["text"] == said
    (segment,) = transcript(http, file, "verbose_json").json()["segments"]
    assert segment["text"].strip() == said
    assert segment["start"] == pytest.approx(0.25, abs=0.15)
    assert segment["end"] == pytest.approx(soundfile.info(file).duration - 0.25, abs=0.3)


def test_transformers_writes_the_same(http: httpx.Client) -> None:
    path = built_in_directory(NAME)
    judge = WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    samples, _ = soundfile.read(SAID[0], dtype="float32")
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    features = torch.from_numpy(extractor(samples, sampling_rate=RATE, return_tensors="np")["input_features"])
    segment = transcript(http, SAID[0], "verbose_json").json()["segments"][0]
    row, end = [judge.generation_config.decoder_start_token_id], judge.config.eos_token_id
    with torch.inference_mode():
        while row[-1] != end and len(row) < 24:
            row.append(int(judge(features, decoder_input_ids=torch.tensor([row])).logits[0, -1].argmax()))
    assert [token for token in segment["tokens"] if token < end] == [token for token in row if token < end]


def test_it_takes_little_room() -> None:
    files = {file.name: file.stat().st_size for file in built_in_directory(NAME).iterdir()}
    assert files["model.safetensors"] <= 2_000_000
    assert sum(files.values()) <= 2_100_000
