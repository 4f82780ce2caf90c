"""Formats by their first bytes: the files are written by libsndfile and ffmpeg."""

from __future__ import annotations

import pytest

from app.errors import UnsupportedError
from app.media.audio import kinds
from app.media.audio.kinds import kind_of
from tests.media.audio.sounds import container_of, file_of, noise

WRITTEN = {"WAV": "wav", "FLAC": "flac", "OGG": "ogg", "MP3": "mp3", "RF64": "wav"}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_libsndfile_writes(kind: str) -> None:
    assert kind_of(file_of(noise(0.5), kind)) == WRITTEN[kind]


@pytest.mark.parametrize(("kind", "codec", "found"), [("ipod", "aac", "mp4"), ("webm", "libopus", "matroska")])
def test_what_ffmpeg_writes(kind: str, codec: str, found: str) -> None:
    assert kind_of(container_of(noise(0.5, 48_000), kind, codec)) == found


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"", "is empty"), (b"hello", "is no sound that is known"), (b"\x89PNG\r\n", "is a picture"), (b"FORM", "AIFF")],
)
def test_others_are_named(data: bytes, said: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{said}.*wav, flac, ogg, mp3"):
        kind_of(data)


@pytest.mark.parametrize(
    ("missing", "data"), [("soundfile", b"fLaC"), ("soxr", b"fLaC"), ("av", b"\0\0\0\x18ftypM4A ")]
)
def test_a_server_without_a_library_says_what_to_install(
    missing: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = kinds.find_spec
    monkeypatch.setattr(kinds, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(UnsupportedError, match=rf"has no {missing}; its operator may run pip install .*\[audio\]"):
        kind_of(data)
