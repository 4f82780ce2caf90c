"""Samples of files, judged by libsndfile's own and by the sound that was written."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from tests.media.audio.sounds import RATE, container_of, file_of, noise, soundfile, soxr, wav

decoding: Any = pytest.importorskip("app.media.audio.decoding")
DecodingError, SoundBounds, decode = decoding.DecodingError, decoding.SoundBounds, decoding.decode
BOUNDS = SoundBounds(RATE, 60.0)


def samples_of(data: bytes, kind: str, bounds: Any = BOUNDS) -> np.ndarray:
    return np.frombuffer(b"".join(decode(data, kind, bounds)), "<i2")


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_whole_numbers_come_as_they_are(kind: str) -> None:
    data = file_of(noise(1.0), kind)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="int16")
    np.testing.assert_array_equal(samples_of(data, kind.lower()), expected)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"])
def test_other_widths(subtype: str) -> None:
    data = file_of(noise(0.5), subtype=subtype)
    expected, _ = soundfile.read(io.BytesIO(data), dtype="float64")
    assert np.abs(samples_of(data, "wav") / 32_768 - expected).max() <= 0.5 / 32_768 + 1e-9


@pytest.mark.parametrize("channels", [2, 3, 8])
def test_channels_are_mixed(channels: int) -> None:
    wave = noise(0.5, channels=channels)
    found = samples_of(file_of(wave, subtype="FLOAT"), "wav") / 32_768
    assert np.abs(found - wave.mean(axis=1)).max() < 1e-4


@pytest.mark.parametrize("rate", [4_000, 8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 192_000])
def test_rates_become_the_model_s(rate: int) -> None:
    """The file is decoded in blocks, the judge resamples it whole."""
    wave = noise(5.0, rate)
    found = samples_of(file_of(wave, subtype="FLOAT", rate=rate), "wav") / 32_768
    expected = soxr.resample(wave[:, 0], rate, RATE)
    assert abs(len(found) - 5 * RATE) <= 1
    size = min(len(found), len(expected))
    assert np.abs(found[:size] - expected[:size]).max() < 1e-3


@pytest.mark.parametrize("kind", ["OGG", "MP3"])
def test_what_is_lossy_stays_near(kind: str) -> None:
    wave = noise(2.0)
    found = samples_of(file_of(wave, kind), kind.lower()) / 32_768
    assert abs(len(found) / RATE - 2.0) < 0.2
    assert _likeness(found, wave[:, 0]) > 0.98


@pytest.mark.parametrize(
    ("kind", "codec", "name"),
    [("ipod", "aac", "mp4"), ("mp4", "aac", "mp4"), ("webm", "libopus", "matroska")],
)
def test_containers(kind: str, codec: str, name: str) -> None:
    wave = noise(2.0, 48_000, channels=2)
    found = samples_of(container_of(wave, kind, codec), name) / 32_768
    assert abs(len(found) / RATE - 2.0) < 0.2
    assert _likeness(found, soxr.resample(wave.mean(axis=1), 48_000, RATE)) > 0.98


def _likeness(found: np.ndarray, wave: np.ndarray) -> float:
    """The correlation where the two fit best: codecs delay."""
    both = np.fft.irfft(np.fft.rfft(found, 1 << 17) * np.fft.rfft(wave, 1 << 17).conj())
    return float(both.max() / np.linalg.norm(found) / np.linalg.norm(wave))


def test_loud_floats_are_clipped() -> None:
    found = samples_of(file_of(noise(0.5) * 9, subtype="FLOAT"), "wav")
    assert (found.max(), found.min()) == (32_767, -32_768)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(bad: float) -> None:
    wave = noise(1.0)
    wave[-1] = bad
    with pytest.raises(DecodingError, match="no numbers"):
        samples_of(file_of(wave, subtype="FLOAT"), "wav")


def test_a_sound_may_be_so_long_and_no_longer() -> None:
    bounds = SoundBounds(RATE, 2.0)
    assert len(samples_of(file_of(noise(2.0)), "wav", bounds)) == 2 * RATE
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        with pytest.raises(DecodingError, match=r"lasts 3 s; at most 2 s"):
            samples_of(file_of(noise(3.0), kind), kind.lower(), bounds)
    with pytest.raises(DecodingError, match="at most 2 s"):
        samples_of(container_of(noise(3.0, 48_000), "ipod", "aac"), "mp4", bounds)


def test_channels_count_as_samples() -> None:
    with pytest.raises(DecodingError, match="samples in all channels"):
        samples_of(file_of(noise(1.5, 192_000, channels=2)[:, [0, 1] * 4], rate=192_000), "wav", SoundBounds(RATE, 2.0))


@pytest.mark.parametrize(("rate", "channels"), [(0, 1), (3_999, 1), (400_000, 1), (RATE, 9)])
def test_odd_forms_are_refused(rate: int, channels: int) -> None:
    with pytest.raises(DecodingError, match=r"malformed|samples a second|channels"):
        samples_of(wav(b"\0" * 720, rate, channels), "wav")
