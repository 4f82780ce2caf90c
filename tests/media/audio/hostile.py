"""Sounds that are meant to do harm, made by script: bombs, lies, cut and broken files, videos, other formats.

Each has a name, the file, and whether it is refused; what is not refused is a sound after all. They are meant for a
server that takes `MAX_S` seconds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from tests.media.audio.sounds import RATE, chunk, container_of, file_of, noise, video, wav

Case = tuple[str, bytes, bool]
MAX_S = 60.0
TEN_HOURS = 36_000
SECOND = noise(1.0)
PCM = (SECOND * 20_000).astype("<i2").tobytes()


def cases() -> list[Case]:
    """All of them."""
    return [*_wav(), *_flac(), *_ogg(), *_mp3(), *_mp4(), *_webm(), *_others()]


def _wav() -> Iterator[Case]:
    yield "wav of 4 bytes", b"RIFF", True
    yield "wav without chunks", chunk(b"RIFF", b"WAVE"), True
    form = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    yield "wav without samples", chunk(b"RIFF", b"WAVE" + chunk(b"fmt ", form)), True
    yield "wav without a form", chunk(b"RIFF", b"WAVE" + chunk(b"data", PCM)), True
    yield "wav of no bytes of samples", wav(b""), True
    for rate in (0, 1, 3_999, 400_000, 0xFFFFFFFF):
        yield f"wav of rate {rate}", wav(PCM, rate), True
    for channels in (0, 9, 1_000, 65_535):
        yield f"wav of {channels} channels", wav(PCM, channels=channels), True
    for bits in (0, 7, 64, 65_535):
        yield f"wav of {bits} bits", wav(PCM, bits=bits), bits != 7
    yield "wav of an unknown codec", wav(PCM, tag=0x9999), True
    yield "wav that is an mp3 inside", wav(file_of(SECOND, "MP3"), tag=0x55), True
    for name, value in (("nan", np.nan), ("inf", np.inf)):
        floats = SECOND.astype("<f4")
        floats[-1] = value
        yield f"wav whose last sample is {name}", wav(floats.tobytes(), bits=32, tag=3), True
        yield f"wav of {name} alone", wav(np.full(RATE, value, "<f8").tobytes(), bits=64, tag=3), True
    yield "wav of huge floats", wav((SECOND * 1e30).astype("<f4").tobytes(), bits=32, tag=3), False
    yield "wav says ten hours and has nothing", wav(b"", size=2 * RATE * TEN_HOURS), True
    yield "wav says ten hours and has a second", wav(PCM, size=2 * RATE * TEN_HOURS), False
    yield "wav of a stream that knew no length", wav(PCM, size=0xFFFFFFFF), False
    yield "wav that is cut", file_of(SECOND)[:9_999], False
    yield "wav that is cut in its header", file_of(SECOND)[:30], True
    yield "wav of 61 s", wav(b"\x80" * 4_000 * 61, 4_000, bits=8), True
    yield "wav of an odd byte", wav(PCM + b"\0"), False
    whole = b"WAVE" + chunk(b"fmt ", form)
    yield "wav of a huge list", chunk(b"RIFF", whole + chunk(b"LIST", b"INFO", 0x7FFFFFFF) + chunk(b"data", PCM)), True
    junk = chunk(b"junk", b"") * 50_000
    yield "wav of 50,000 empty chunks", chunk(b"RIFF", whole + junk + chunk(b"data", PCM)), True
    yield "wav of two forms", chunk(b"RIFF", whole + chunk(b"fmt ", b"\xff" * 16) + chunk(b"data", PCM)), True
    yield "rf64 without its sizes", b"RF64" + file_of(SECOND)[4:], False


def _flac() -> Iterator[Case]:
    whole = file_of(SECOND, "FLAC")
    info = whole.index(b"fLaC") + 8

    def says(rate: int = RATE, channels: int = 1, samples: int = RATE, bits: int = 16) -> bytes:
        packed = rate << 44 | channels - 1 << 41 | bits - 1 << 36 | samples
        return whole[: info + 10] + packed.to_bytes(8) + whole[info + 18 :]

    yield "flac says ten hours", says(samples=RATE * TEN_HOURS), True
    yield "flac says the longest", says(samples=(1 << 36) - 1), True
    yield "flac says rate 0", says(rate=0), True
    yield "flac says rate 1", says(rate=1), True
    yield "flac says 655350", says(rate=655_350), True
    yield "flac says 8 channels of one", says(channels=8), True
    silence = np.zeros((4_000 * 900, 1), np.float32)
    bomb = file_of(silence, "FLAC", 4_000)
    yield "flac of 900 s of silence", bomb, True
    yield (
        "flac of 900 s that says nothing",
        bomb[: info + 13] + bytes([bomb[info + 13] & 0xF0, 0, 0, 0, 0]) + bomb[26:],
        True,
    )
    yield "flac of its header", whole[:42], True
    for share in (5, 10, 15):
        yield f"flac cut to {share}/20", whole[: len(whole) * share // 20], True
    frames = whole.index(b"\xff\xf8")
    yield "flac of garbled frames", whole[:frames] + b"\xff\xf8" + b"\xa5" * 5_000, True
    yield "flac of a huge picture", whole[:4] + b"\6\xff\xff\xff" + whole[4:], True
    yield "flac of a long row of empty blocks", whole[:4] + b"\1\0\0\0" * 50_000 + whole[4:], False


def _ogg() -> Iterator[Case]:
    whole = file_of(SECOND, "OGG")
    yield "ogg of its first page", whole[: whole.index(b"OggS", 4)], True
    yield "ogg of 4 bytes", b"OggS", True
    yield "ogg that is cut", whole[: len(whole) * 3 // 4], True
    yield "ogg of garbage", b"OggS\0\2" + b"\xff" * 9_999, True
    garbled = bytearray(whole)
    garbled[len(whole) // 2] ^= 0xFF
    yield "ogg of a wrong sum", bytes(garbled), True
    yield "ogg of 61 s of silence", file_of(np.zeros((61 * 8_000, 1), np.float32), "OGG", 8_000), True
    yield "ogg of two streams", whole + file_of(noise(1.0, 8_000), "OGG", 8_000), False
    last = whole.rindex(b"OggS")
    yield "ogg that says the longest", whole[: last + 6] + b"\xff" * 7 + b"\x7f" + whole[last + 14 :], True


def _mp3() -> Iterator[Case]:
    whole = file_of(SECOND, "MP3")
    yield "mp3 of a tag alone", b"ID3\4\0\0\0\0\0\0", True
    yield "mp3 of a huge tag", b"ID3\4\0\0\x7f\x7f\x7f\x7f" + whole, True
    yield "mp3 of a picture bomb", b"ID3\4\0\0\0\1\0\0APIC\x7f\x7f\x7f\x7f\0\0" + whole, True
    yield "mp3 of one header", b"\xff\xfb\x90\x00", True
    yield "mp3 of garbage", b"\xff\xfb\x90\x00" + b"\xa5" * 20_000, True
    yield "mp3 that is cut", whole[: len(whole) // 2], False
    yield "mp3 of 61 s", file_of(np.zeros((61 * 8_000, 1), np.float32), "MP3", 8_000), True
    yield "mp3 of two rates", whole + file_of(noise(1.0, 44_100), "MP3", 44_100), False


def _mp4() -> Iterator[Case]:
    whole = container_of(noise(1.0, 48_000), "ipod", "aac")
    yield "mp4 of a video alone", video(), True
    yield "mp4 of its first atom", whole[:24], True
    yield "mp4 that is cut", whole[: len(whole) // 2], True
    yield "mp4 without an index", whole.replace(b"moov", b"junk"), True
    yield "mp4 of 61 s", container_of(np.zeros((61 * 8_000, 1), np.float32), "ipod", "aac", 8_000), True
    header = whole.index(b"mdhd") + 4
    yield "mp4 says ten hours", whole[: header + 16] + (48_000 * TEN_HOURS).to_bytes(4) + whole[header + 20 :], False
    sizes = whole.index(b"stsz") + 4
    yield "mp4 of too many packets", whole[: sizes + 8] + b"\x7f\xff\xff\xff" + whole[sizes + 12 :], True
    yield "mp4 of atoms in atoms", whole[:24] + _nested(2_000), True
    yield "mp4 of a huge atom", whole[:24] + b"\0\0\0\1moov" + b"\x7f" + b"\xff" * 7, True
    yield "mp4 whose sound lies elsewhere", whole.replace(b"\0\0\0\1url ", b"\0\0\0\0url "), False


def _nested(depth: int) -> bytes:
    found = b""
    for _ in range(depth):
        found = struct.pack(">I", len(found) + 8) + b"moov" + found
    return found


def _webm() -> Iterator[Case]:
    whole = container_of(noise(1.0, 48_000), "webm", "libopus")
    yield "webm of a video alone", video("webm", "libvpx"), True
    yield "webm of its first bytes", whole[:40], True
    yield "webm that is cut", whole[: len(whole) // 2], False
    yield "webm of garbage", whole[:4] + b"\xff" * 9_999, True
    yield "webm of elements in elements", whole[:4] + b"\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xff" * 2_000, True
    yield "webm of 61 s", container_of(np.zeros((61 * 48_000, 1), np.float32), "webm", "libopus"), True


def _others() -> Iterator[Case]:
    for name, data in (
        ("nothing", b""),
        ("text", b"hello"),
        ("a page", b"<html><script>alert(1)</script>"),
        ("a playlist", b"#EXTM3U\nfile:///etc/passwd\n"),
        ("a playlist of ffmpeg", b"ffconcat version 1.0\nfile /etc/passwd\n"),
        ("a picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 99),
        ("a zip archive", b"PK\3\4" + b"\0" * 99),
        ("gzip", b"\x1f\x8b" + b"\0" * 99),
        ("a pickle", b"\x80\4cos\nsystem\n."),
        ("AMR", b"#!AMR\n" + b"\0" * 99),
        ("AIFF", b"FORM\0\0\0\0AIFF"),
        ("JSON", b'{"a": 1}'),
    ):
        yield name, data, True
