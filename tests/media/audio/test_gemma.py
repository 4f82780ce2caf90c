"""Gemma 4's sounds: frames, tokens and features are those of transformers' extractor and processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import Gemma4AudioFeatureExtractor

from app.errors import CheckpointError, InvalidRequestError, UnsupportedError
from app.media.audio.gemma import Gemma4Sounds
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
