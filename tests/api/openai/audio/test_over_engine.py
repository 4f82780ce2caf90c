"""Transcriptions over a real engine of a random Whisper, judged by transformers' forward passes and extractor."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor
from transformers.generation.utils import GenerateEncoderDecoderOutput

from app.api.openai.audio.attempts import PieceRequests
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.api.conftest import Server
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.api.openai.audio.speech_model import LANGUAGES, NUM_MELS, with_speech, write_speech_model, write_weights
from tests.media.audio.sounds import RATE, file_of, noise
from tests.tiny_sounds import judged, sound_input, whisper_judge

openai = pytest.importorskip("openai")
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_speech_model(tmp_path_factory.mktemp("whisper"))
    write_weights(path)
    return path


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[EngineInThisProcess]:
    found = EngineInThisProcess(str(directory), dtype="float32")
    (model,) = found.models.values()
    with_speech(model)
    yield found
    found.engine.shutdown()
    assert model.speech is not None
    model.speech.reader.close()


@pytest.fixture(scope="module")
def sdk(engine: EngineInThisProcess) -> Iterator[Any]:
    with Server(create_app(engine, RequestLimits())) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def heard(wave: np.ndarray) -> Any:
    """What transformers' extractor makes of a sound as a file holds it."""
    samples = np.clip(np.rint(wave[:, 0] * 32_768), -32_768, 32_767).astype(np.float32) / 32_768
    extractor = WhisperFeatureExtractor(feature_size=NUM_MELS, chunk_length=1)
    return sound_input(extractor(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0])


def file(wave: np.ndarray) -> io.BytesIO:
    data = io.BytesIO(file_of(wave))
    data.name = "a.wav"
    return data


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_tokens_are_those_of_transformers(
    engine: EngineInThisProcess, directory: Path, sdk: Any, seconds: float
) -> None:
    (model,) = engine.models.values()
    assert model.speech is not None
    wave, info = noise(seconds, seed=3), model.speech.info
    given = heard(wave)
    logits, _ = judged(directory, given, [info.start], 1)
    language = max(LANGUAGES, key=lambda code: float(logits[-1, info.languages[code]]))
    verbose = sdk.audio.transcriptions.create(file=file(wave), model=str(directory), response_format="verbose_json")
    assert verbose.language == {"en": "english", "de": "german", "ja": "japanese"}[language]

    prompt = info.prompt(language, "transcribe", timestamps=False)
    _, expected = judged(directory, given, prompt, NUM_TOKENS)
    *_, done = sdk.audio.transcriptions.create(file=file(wave), model=str(directory), stream=True, include=["logprobs"])
    ends = [i for i, token in enumerate(expected) if token == info.end]
    said = [token for token in expected[: ends[0] if ends else None] if model.speech.is_text(token, model.tokenizer)]
    found = [bytes(one.bytes or ()) for one in done.logprobs or ()]
    assert found[: len(said)] == [model.tokenizer.token_bytes(token) for token in said]
    assert said


def test_words_are_heard_when_transformers_hears_them(
    engine: EngineInThisProcess, directory: Path, sdk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = engine.models.values()
    assert model.speech is not None
    written: list[tuple[list[int], list[int]]] = []  # prompt and text of what was aligned
    align = PieceRequests.align

    async def noted(self: Any, attempt: Any, *given: Any) -> Any:
        written.append((self._prompt(given[0]), list(attempt.output.token_ids)))
        return await align(self, attempt, *given)

    monkeypatch.setattr(PieceRequests, "align", noted)
    wave = noise(0.9, seed=12)
    options = {"model": str(directory), "language": "en", "temperature": 0.7, "response_format": "verbose_json"}
    options |= {"timestamp_granularities": ["word"], "extra_body": {"seed": 3}}
    alone = sdk.audio.transcriptions.create(file=file(wave), **options)
    ((prompt, tokens),) = written
    ends = _judged_ends(directory, heard(wave), prompt, tokens, num_frames=90)
    is_text = lambda token: model.speech.is_text(token, model.tokenizer)  # noqa: E731
    expected = {round(ends[place], 2) for place, token in enumerate(tokens) if is_text(token)}
    found = {word.end for word in alone.words}
    assert len(found) > 1
    assert all(min(abs(end - other) for other in expected) <= 0.04 for end in found)
    assert [word.start for word in alone.words] == sorted(word.start for word in alone.words)


def _judged_ends(directory: Path, given: Any, prompt: list[int], tokens: list[int], num_frames: int) -> list[float]:
    """transformers' times of tokens that were written behind a prompt."""
    judge = whisper_judge(directory)
    features = torch.from_numpy(np.array(given.array())).unsqueeze(0)
    with torch.inference_mode():
        out = judge(features, decoder_input_ids=torch.tensor([[*prompt, *tokens[:-1]]]), output_attentions=True)
    made = GenerateEncoderDecoderOutput(torch.tensor([[*prompt, *tokens]]), cross_attentions=(out.cross_attentions,))
    options = {"num_frames": num_frames, "num_input_ids": len(prompt)}
    times = judge._extract_token_timestamps(made, [[0, 1], [0, 3]], **options)
    found: list[float] = times[0, len(prompt) :].tolist()
    return found


def test_pieces_run_side_by_side(directory: Path, sdk: Any) -> None:
    """Each is what it is alone: streams are greedy and are not asked again."""
    waves = [noise(0.7, seed=i) for i in range(3)]
    gap = np.zeros((round(0.3 * RATE), 1), np.float32)
    whole = np.concatenate([part for wave in waves for part in (wave, gap)])
    options = {"model": str(directory), "stream": True, "language": "en"}
    *deltas, done = sdk.audio.transcriptions.create(file=file(whole), **options)
    assert "".join(event.delta for event in deltas) == done.text
    assert done.usage.input_token_details.audio_tokens == 150
    again = [*sdk.audio.transcriptions.create(file=file(whole), **options)][-1]
    assert again.text == done.text
