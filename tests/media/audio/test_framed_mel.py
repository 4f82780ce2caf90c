"""Features of frames within a sound, judged by transformers' extractors of Gemma 3n, Gemma 4 and Phi-4."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import Gemma3nAudioFeatureExtractor, Gemma4AudioFeatureExtractor, Phi4MultimodalFeatureExtractor

from app.media.audio.features import FEATURES
from app.media.audio.framed_mel import FramedMelFeatures, FramedMelSettings
from tests.media.audio.test_mel import RATE, wave

GEMMA3N = FramedMelSettings(RATE, 128, 1, 512, 160, 1024, 125.0, 7600.0, emphasis=0.97)
GEMMA4 = FramedMelSettings(
    RATE, 128, 1, 320, 160, 512, 0.0, 8000.0, silence=160, floor=1e-3, is_floor_added=True,
    mean=tuple(np.linspace(-1, 1, 128)), deviation=tuple(np.linspace(1, 2, 128)),
)  # fmt: skip
PHI4 = FramedMelSettings(
    RATE, 80, 1, 400, 160, 512, 0.0, 7690.0, emphasis=0.97, floor=1.0, power=2, scale=32_768.0, is_kaldi=True
)


def made(settings: FramedMelSettings, num_frames: int, samples: np.ndarray) -> np.ndarray:
    own = FramedMelSettings(**{**settings.as_json(), "num_frames": num_frames})
    found = FEATURES.load("framed_mel").of_json(own.as_json()).of(samples)
    assert isinstance(FEATURES.load("framed_mel").of_json(own.as_json()), FramedMelFeatures)
    assert found.dtype == np.float32
    return found.T


@pytest.mark.parametrize("seconds", [0.5, 3.21, 29.9])
def test_gemma_3n(seconds: float) -> None:
    samples = wave(seconds)
    expected = Gemma3nAudioFeatureExtractor()([samples])["input_features"][0]
    np.testing.assert_allclose(made(GEMMA3N, len(expected), samples), expected, atol=2e-3)


@pytest.mark.parametrize("seconds", [0.5, 3.21, 29.9])
def test_gemma_4(seconds: float) -> None:
    samples = wave(seconds)
    judge = Gemma4AudioFeatureExtractor(per_bin_mean=list(GEMMA4.mean), per_bin_stddev=list(GEMMA4.deviation))
    given = judge([samples])
    count = int(given["input_features_mask"][0].sum())
    assert given["input_features_mask"][0][:count].all()
    np.testing.assert_allclose(made(GEMMA4, count, samples), given["input_features"][0][:count], atol=1e-4)


@pytest.mark.parametrize("seconds", [0.5, 3.21, 29.9])
def test_phi_4(seconds: float) -> None:
    samples = wave(seconds)
    expected = Phi4MultimodalFeatureExtractor()(samples, sampling_rate=RATE)["audio_input_features"][0].numpy()
    np.testing.assert_allclose(made(PHI4, len(expected), samples), expected, atol=2e-3)
