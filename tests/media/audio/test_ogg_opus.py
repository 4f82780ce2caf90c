"""Opus in stretches sounds as it does whole, to the sample; what is no plain stream is not cut."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from app.config.media import MediaConfig
from app.media.audio import ogg_opus
from app.media.audio.ogg_opus import Stretch, is_opus, stretches
from app.media.audio.reader import SoundReader
from tests import limits
from tests.media.audio.sounds import RATE, file_of, noise

SECONDS = 21.3


@functools.cache
def opus(seconds: float = SECONDS, rate: int = RATE, channels: int = 1) -> bytes:
    return file_of(noise(seconds, rate, seed=5, channels=channels), "OGG", rate, "OPUS")


def a_reader() -> SoundReader:
    return SoundReader(MediaConfig(max_decoders=2, decode_timeout_s=limits.patience_s()), b"k" * 32)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ogg_opus, "STRETCH_S", 4.0)


@pytest.mark.parametrize(("rate", "channels"), [(RATE, 1), (48_000, 2)])
def test_stretches_are_the_whole(rate: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, reader = opus(SECONDS, rate, channels), a_reader()
    assert is_opus(data)
    parts = stretches(data)
    assert len(parts) >= 4
    found = reader.decode(data, RATE)
    monkeypatch.setattr(ogg_opus, "STRETCH_S", 1e9)
    (whole,) = stretches(data)
    assert whole.data == data
    expected = reader.decode(data, RATE).samples.astype(np.float64)
    reader.close()
    assert len(found.samples) == len(expected)
    assert abs(found.seconds - SECONDS) < 0.05
    apart = found.samples - expected
    assert np.linalg.norm(apart) < 1e-3 * np.linalg.norm(expected)  # the decoders began elsewhere
    assert np.abs(apart).max() < 0.02 * np.abs(expected).max()


def test_a_file_that_is_cut_off_keeps_what_is_there() -> None:
    data, reader = opus()[: len(opus()) // 2], a_reader()
    assert len(stretches(data)) > 1
    assert 0.4 * SECONDS < reader.decode(data, RATE).seconds < 0.6 * SECONDS
    reader.close()


def _pages(data: bytes) -> list[bytes]:
    return [b"OggS" + page for page in data.split(b"OggS")[1:]]


def test_what_is_not_one_plain_stream_is_one_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = opus()
    pages = _pages(data)
    back = bytearray(pages[5])
    back[6:14] = bytes(8)  # samples so far
    unfinished = bytearray(pages[5])
    unfinished[6:14] = b"\xff" * 8
    other = bytearray(pages[5])
    other[14] ^= 1  # the stream's number
    for wrong in (
        data + data,  # one stream behind another
        b"".join([*pages[:5], b"between", *pages[5:]]),
        *(b"".join([*pages[:5], bytes(page), *pages[6:]]) for page in (back, unfinished, other)),
        b"".join(pages[:3]),
        pages[0],
        b"OggS",
    ):
        assert stretches(wrong) == [Stretch(wrong, None, 0)]
    monkeypatch.setattr(ogg_opus, "_MOST_PAGES", 5)
    assert stretches(data) == [Stretch(data, None, 0)]
    assert not is_opus(file_of(noise(0.5), "OGG"))
