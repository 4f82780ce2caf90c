"""Opus in stretches sounds as it does whole, to the sample; what is no plain stream is not cut."""

from __future__ import annotations

import functools
import struct

import numpy as np
import pytest

from app.config.media import MediaConfig
from app.errors import InvalidRequestError
from app.media.audio import ogg_opus
from app.media.audio.ogg_opus import Stretch, is_opus, seconds, stretches
from app.media.audio.reader import SoundReader
from tests import limits
from tests.media.audio.sounds import RATE, container_of, file_of, noise

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


def test_a_file_that_lasts_too_long_is_one_stretch_and_is_refused() -> None:
    data = opus()
    assert len(stretches(data, SECONDS)) > 1
    assert stretches(data, SECONDS - 0.01) == [Stretch(data, None, 0)]
    reader = a_reader()
    try:
        with pytest.raises(InvalidRequestError, match="lasts 21 s; at most 10 s"):
            reader.decode(data, RATE, 10.0)
        assert reader.known_bytes(data, RATE) == pytest.approx(2 * RATE * SECONDS, abs=2)
        assert reader.known_bytes(file_of(noise(0.5)), RATE) == 0
    finally:
        reader.close()


def test_silence_that_a_recorder_left_out_is_not_taken_from_the_sound() -> None:
    pages = _pages(opus())
    late = []
    for page in pages[6:]:
        (place,) = struct.unpack_from("<q", page, 6)
        late.append(page[:6] + struct.pack("<q", place + 30 * 48_000) + page[14:])
    data = b"".join([*pages[:6], *late])
    assert stretches(data) == [Stretch(data, None, 0)]
    assert seconds(data) is None


def test_other_writers_files_are_cut() -> None:
    assert len(stretches(container_of(noise(SECONDS, 48_000, seed=5), "ogg", "libopus"))) >= 4


# First bytes of packets, and how many samples they have (RFC 6716, 3.1 and 3.2).
PACKETS = {
    bytes([0 << 3]): 480,
    bytes([1 << 3 | 1]): 2 * 960,
    bytes([7 << 3 | 2]): 2 * 2_880,
    bytes([10 << 3 | 3, 2]): 2 * 1_920,
    bytes([12 << 3]): 480,
    bytes([15 << 3 | 3, 0x80 | 0x40 | 6]): 6 * 960,
    bytes([16 << 3]): 120,
    bytes([21 << 3 | 1]): 2 * 240,
    bytes([30 << 3 | 3, 48]): 48 * 480,
    bytes([31 << 3]): 960,
}


def _page(kind: int, place: int, parts: list[int], body: bytes) -> bytes:
    return struct.pack("<4sBBqIIIB", b"OggS", 0, kind, place, 7, 0, 0, len(parts)) + bytes(parts) + body


@pytest.mark.parametrize("wrong", [0, 120, -120])
def test_packets_say_how_long_they_are(wrong: int) -> None:
    """Each packet begins in one page and ends in the next."""
    before = 312
    head = b"OpusHead" + struct.pack("<BBHIhB", 1, 1, before, 48_000, 0, 0)
    pages = [_page(2, 0, [len(head)], head), _page(0, 0, [8], b"OpusTags")]
    pages.append(_page(0, 960, [3, 255], bytes([31 << 3, 0, 0]) + next(iter(PACKETS)).ljust(255, b"\1")))
    place, firsts = 960, list(PACKETS)
    for first, following in zip(firsts, [*firsts[1:], b""], strict=True):
        place += PACKETS[first]
        said = place + wrong * (first == firsts[4])
        parts, body = ([0, 255], following.ljust(255, b"\1")) if following else ([0], b"")
        pages.append(_page(1, said, parts, body))
    assert seconds(b"".join(pages)) == (None if wrong else (960 + sum(PACKETS.values()) - before) / 48_000)
