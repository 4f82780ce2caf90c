"""Sounds of Qwen2.5-Omni, Qwen3-Omni and Qwen3-ASR, judged by transformers' extractors and the rules of its
processors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

from app.errors import CheckpointError, InvalidRequestError, UnsupportedError
from app.media.audio.qwen_omni import OmniSounds, Qwen2_5OmniSounds, Qwen3AsrSounds, Qwen3OmniSounds, halved
from app.media.reader import MediaReader
from tests.media.audio.sounds import RATE, file_of, noise, whole_numbers
from tests.media.media_model import reader as make_reader

EXTRACTOR = {"feature_size": 12, "chunk_length": 4}


def processor(kind: type[OmniSounds], own: dict[str, Any] = EXTRACTOR, **ears: Any) -> OmniSounds:
    return kind(kind.settings_of(own, {"audio_config": {"num_mel_bins": 12, **ears}}) | {"placeholder": "<A>"})


@pytest.fixture(scope="module")
def reader() -> Iterator[MediaReader]:
    found = make_reader(max_decoders=1)
    yield found
    found.close()


def read(reader: MediaReader, own: OmniSounds, seconds: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Samples as a file of 16 bits holds them, the features made of them, and the tokens."""
    wave = whole_numbers(noise(seconds, seed=2))
    picture = reader.read_sound(file_of(wave), type(own).__name__, own, 1e9)
    assert picture.layout.grid[:2] == (1, 1)
    found = np.frombuffer(picture.pixels, "<f4").reshape(picture.shape)
    assert found.shape[1] == picture.layout.grid[2]
    return wave[:, 0].astype(np.float32) / 32_768, found, picture.layout.num_tokens


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1.777, 3.9])
def test_qwen2_5_omni_hears_what_transformers_does(reader: MediaReader, seconds: float) -> None:
    samples, found, tokens = read(reader, processor(Qwen2_5OmniSounds), seconds)
    options: dict[str, Any] = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "np"}
    given = WhisperFeatureExtractor(**EXTRACTOR)(samples, sampling_rate=RATE, **options)
    frames = int(given["attention_mask"].sum())
    assert tokens == ((frames - 1) // 2 + 1 - 2) // 2 + 1
    np.testing.assert_allclose(found, given["input_features"][0][:, :frames], atol=2e-4)


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1.777, 4.1])
def test_qwen3_omni_hears_what_transformers_does(reader: MediaReader, seconds: float) -> None:
    samples, found, tokens = read(reader, processor(Qwen3OmniSounds), seconds)
    options: dict[str, Any] = {"padding": True, "truncation": False, "return_attention_mask": True}
    given = WhisperFeatureExtractor(**EXTRACTOR)(samples, sampling_rate=RATE, return_tensors="np", **options)
    frames = int(given["attention_mask"].sum())
    assert tokens == int(_get_feat_extract_output_lengths(np.array(frames)))
    np.testing.assert_allclose(found, given["input_features"][0][:, :frames], atol=2e-4)


@pytest.mark.parametrize("seconds", [0.2, 0.5, 1.777, 4.1])
def test_qwen3_asr_hears_what_transformers_does(reader: MediaReader, seconds: float) -> None:
    """Less than half a second has silence behind it."""
    samples, found, tokens = read(reader, processor(Qwen3AsrSounds), seconds)
    given = Qwen3ASRFeatureExtractor(feature_size=12)(
        samples, sampling_rate=RATE, padding=True, return_tensors="np", return_attention_mask=True
    )
    frames = int(given["attention_mask"].sum())
    assert tokens == int(_get_feat_extract_output_lengths(np.array(frames)))
    np.testing.assert_allclose(found, given["input_features"][0][:, :frames], atol=2e-4)


@pytest.mark.parametrize("kind", [Qwen2_5OmniSounds, Qwen3OmniSounds, Qwen3AsrSounds])
@pytest.mark.parametrize("most", [1, 7, 13, 20, 26])
def test_the_longest_that_so_many_tokens_are(kind: type[OmniSounds], most: int) -> None:
    own = processor(kind)
    samples = round(own.max_s(most) * RATE)
    assert own.layout(samples).num_tokens <= max(most, own.layout(1_000).num_tokens)
    assert own.layout(samples + 8 * own.mel.hop + 8_000).num_tokens > most


def test_what_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"lasts 4.06 s; the model hears 4 s"):
        processor(Qwen2_5OmniSounds).layout(65_000)
    for kind in (Qwen2_5OmniSounds, Qwen3OmniSounds):
        with pytest.raises(InvalidRequestError, match="too short for the model"):
            processor(kind).layout(150)
    with pytest.raises(UnsupportedError, match="n_window=40; 50 is supported"):
        processor(Qwen3OmniSounds, n_window=40)
    with pytest.raises(CheckpointError, match="feature_size is 80, which contradicts"):
        processor(Qwen3AsrSounds, {"feature_size": 80})
    with pytest.raises(CheckpointError, match="min_length is -1"):
        processor(Qwen3AsrSounds, {"feature_size": 12, "min_length": -1})


def test_halves() -> None:
    assert [halved(frames, 3) for frames in (0, 1, 8, 9, 100)] == [0, 1, 1, 2, 13]
