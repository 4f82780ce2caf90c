"""Features of pieces, judged by transformers' extractor of Whisper's."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from app.media.audio.mel import MelFeatures, MelSettings

RATE = 16_000


def wave(seconds: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    size = round(seconds * RATE)
    tones = np.sin(np.arange(size)[:, None] * rng.uniform(0.01, 2.0, 5)).mean(axis=1)
    return (0.3 * tones + 0.05 * rng.standard_normal(size)).astype(np.float32)


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.01, 0.5, 7.3, 29.99, 30.0, 31.0])
def test_features_are_whisper_s(seconds: float, num_mels: int) -> None:
    samples = wave(seconds)
    judge = WhisperFeatureExtractor(feature_size=num_mels)
    expected = judge(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    found = MelFeatures(MelSettings(num_mels=num_mels)).of(samples)
    assert found.shape == expected.shape == (num_mels, 3_000)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_other_frames() -> None:
    samples = wave(3.0)
    judge = WhisperFeatureExtractor(feature_size=40, n_fft=512, hop_length=200, chunk_length=10)
    expected = judge(samples, sampling_rate=RATE, return_tensors="np").input_features[0]
    found = MelFeatures(MelSettings(num_mels=40, num_frames=800, fft=512, hop=200)).of(samples)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_silence() -> None:
    judge = WhisperFeatureExtractor()
    expected = judge(np.zeros(RATE, np.float32), sampling_rate=RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(MelFeatures(MelSettings()).of(np.zeros(RATE, np.float32)), expected, atol=1e-6)


def test_a_whole_piece() -> None:
    assert MelSettings().seconds == 30.0
    assert MelSettings().num_samples == 480_000
