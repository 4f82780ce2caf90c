"""Phi-4's sounds: frames, tokens and features are those of transformers' extractor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import Phi4MultimodalFeatureExtractor

from app.errors import CheckpointError, InvalidRequestError
from app.media.audio.phi4 import Phi4Sounds
from tests.media.audio.sounds import RATE, file_of, noise, whole_numbers
from tests.media.media_model import reader as make_reader


def processor(own: dict[str, Any], **ears: Any) -> Phi4Sounds:
    return Phi4Sounds(Phi4Sounds.settings_of(own, {"audio_config": ears}) | {"placeholder": "<A>"})


def test_a_sound_is_what_transformers_hears() -> None:
    reader, own = make_reader(max_decoders=1), processor({})
    for seconds in (0.5, 2.345, 31.0):
        wave = whole_numbers(noise(seconds, seed=3))
        picture = reader.read_sound(file_of(wave), "phi4", own, 1e9)
        given = Phi4MultimodalFeatureExtractor()(wave[:, 0].astype(np.float32) / 32_768, sampling_rate=RATE)
        expected = given["audio_input_features"][0].numpy()
        assert picture.layout.grid == (1, 1, len(expected))
        assert picture.layout.num_tokens == int(given["audio_embed_sizes"][0])
        found = np.frombuffer(picture.pixels, "<f4").reshape(picture.shape)
        np.testing.assert_allclose(found.T, expected, atol=3e-3)
    reader.close()


def test_bounds() -> None:
    own = processor({})
    with pytest.raises(InvalidRequestError, match="too short for the model"):
        own.layout(399)
    for most in (1, 5, 100):
        samples = round(own.max_s(most) * RATE)
        assert own.layout(samples).num_tokens == most
        assert own.layout(samples + 160).num_tokens == most + 1


def test_settings_that_contradict_each_other() -> None:
    for own, ears, says in (
        ({"feature_size": 40}, {}, "feature_size is 40, which contradicts input_size, 80"),
        ({"audio_downsample_rate": 2}, {}, "audio_downsample_rate is 2"),
        ({}, {"time_reduction": 4}, "time_reduction is 4"),
        ({"n_fft": 256}, {}, "win_length within n_fft"),
        ({"hop_length": 0}, {}, "hop_length is 0"),
    ):
        with pytest.raises(CheckpointError, match=says):
            processor(own, **ears)
