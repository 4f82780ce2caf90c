"""Gemma 3n's and 4's sounds: frames, tokens and features are those of transformers' extractors and processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import Gemma3nAudioFeatureExtractor, Gemma4AudioFeatureExtractor

from app.errors import CheckpointError, InvalidRequestError, UnsupportedError
from app.media.audio.gemma import Gemma3nSounds, Gemma4Sounds
from tests.media.audio.sounds import RATE, file_of, noise, whole_numbers
from tests.media.media_model import reader as make_reader


def processor(**own: Any) -> Gemma4Sounds:
    marks = {"placeholder": "<A>", "begin": "<B>", "end": "<E>"}
    return Gemma4Sounds(Gemma4Sounds.settings_of(own, {"audio_config": {}}) | marks)


def test_a_sound_is_what_transformers_hears() -> None:
    reader, own = make_reader(max_decoders=1), processor()
    assert own.around == ("<B>", "<E>")
    for seconds in (0.5, 2.345, 30.0):
        wave = whole_numbers(noise(seconds, seed=3))
        picture = reader.read_sound(file_of(wave), "gemma4", own, 1e9)
        given = Gemma4AudioFeatureExtractor()([wave[:, 0].astype(np.float32) / 32_768])
        mask = given["input_features_mask"][0]
        frames = int(mask.sum())
        for _ in range(2):  # as its processor counts tokens
            mask = mask[::2][: (len(mask) - 1) // 2 + 1]
        assert picture.layout.grid == (1, 1, frames)
        assert picture.layout.num_tokens == int(mask.sum())
        found = np.frombuffer(picture.pixels, "<f4").reshape(picture.shape)
        np.testing.assert_allclose(found.T, given["input_features"][0][:frames], atol=1e-3)
    reader.close()


def test_bounds() -> None:
    own = processor()
    with pytest.raises(InvalidRequestError, match=r"lasts 30.01 s; the model hears 30 s"):
        own.layout(480_160)
    with pytest.raises(InvalidRequestError, match="too short for the model"):
        own.layout(160)
    for most in (1, 5, 100):
        assert own.layout(round(own.max_s(most) * RATE)).num_tokens <= most
    assert own.max_s(10_000) == 30.0


def test_settings() -> None:
    assert processor(frame_length_ms=32.0, fft_overdrive=True, preemphasis=0.97).mel.fft == 1024
    for own, says in (
        ({"dither": 0.1}, r"dither=0.1 is not supported"),
        ({"preemphasis": 0.9, "preemphasis_htk_flavor": False}, "preemphasis_htk_flavor=False is not supported"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            processor(**own)
    with pytest.raises(CheckpointError, match="frame_length_ms is 0"):
        processor(frame_length_ms=0)


def processor_3n(hf: dict[str, Any] | None = None, **own: Any) -> Gemma3nSounds:
    marks = {"placeholder": "<A>", "begin": "<B>", "end": "<E>"}
    return Gemma3nSounds(Gemma3nSounds.settings_of(own, hf or {}) | marks)


def test_gemma_3n_hears_what_transformers_hears() -> None:
    reader, own = make_reader(max_decoders=1), processor_3n()
    assert own.around == ("\n\n<B>", "<E>\n\n")  # as Gemma3nProcessor writes it
    for seconds in (0.04, 2.345, 30.0):
        wave = whole_numbers(noise(seconds, seed=3))
        sound = reader.read_sound(file_of(wave), "gemma3n", own, 1e9)
        given = Gemma3nAudioFeatureExtractor()([wave[:, 0].astype(np.float32) / 32_768])
        expected = given["input_features"][0]
        assert given["input_features_mask"][0].all()
        assert sound.layout.grid == (1, 1, len(expected))
        assert sound.layout.num_tokens == 188
        found = np.frombuffer(sound.pixels, "<f4").reshape(sound.shape)
        np.testing.assert_allclose(found.T, expected, atol=1e-2)  # of numbers to -11.5; it windows in fp32
    reader.close()


def test_bounds_of_gemma_3n() -> None:
    own = processor_3n()
    with pytest.raises(InvalidRequestError, match=r"lasts 30.01 s; the model hears 30 s"):
        own.layout(480_160)
    with pytest.raises(InvalidRequestError, match="too short for the model"):
        own.layout(512)
    assert own.layout(513).grid == (1, 1, 1)
    assert (own.max_s(187), own.max_s(188)) == (0.0, 30.0)
    few = processor_3n({"audio_soft_tokens_per_image": 5, "audio_config": {"conf_reduction_factor": 2}})
    assert few.layout(round(few.max_s(5) * RATE)).grid == (1, 1, 40)
    with pytest.raises(InvalidRequestError, match=r"the model hears 0\.432 s"):
        few.layout(round(few.max_s(5) * RATE) + 1)
    with pytest.raises(CheckpointError, match="audio_soft_tokens_per_image is 0"):
        processor_3n({"audio_soft_tokens_per_image": 0})
