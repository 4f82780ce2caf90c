"""Tells a sound file's format by its first bytes, whatever the client calls it, and who reads it."""

from __future__ import annotations

from importlib.util import find_spec

from app.errors import InvalidRequestError, UnsupportedError
from app.media.audio.ogg_opus import is_opus

KNOWN = "wav, flac, ogg, mp3, m4a, mp4 and webm are read"
# The module that reads a format, by the format's name.
READERS = {
    "wav": "soundfile",
    "flac": "soundfile",
    "ogg": "soundfile",
    "opus": "av",  # in Ogg; libsndfile takes twice as long
    "mp3": "soundfile",
    "mp4": "av",
    "matroska": "av",
}
RESAMPLER = "soxr"
INSTALL = "pip install 'manta-serve[audio]'"
_MAGICS = {b"fLaC": "flac", b"OggS": "ogg", b"ID3": "mp3", b"\x1aE\xdf\xa3": "matroska"}
_OTHERS = {
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"%PDF": "PDF",
    b"PK\3\4": "a zip archive",
    b"\x1f\x8b": "gzip",
    b"#!AMR": "AMR",
    b"FORM": "AIFF",
    b"caff": "CAF",
    b"MThd": "MIDI",
    b".snd": "AU",
    b"0&\xb2u": "WMA",
    b"#EXTM3U": "a playlist",
    b"<": "a page",
    b"{": "JSON",
    b"\x93NUMPY": "a NumPy array",
    b"\x80": "a pickle",
}


def kind_of(data: bytes) -> str:
    """The format of a file, one of READERS.

    UnsupportedError for what is none of them, or needs a library that is not installed. The messages go on behind the
    name of the field.
    """
    kind = _kind(data)
    if kind is None:
        raise UnsupportedError(f"{_what(data)}; {KNOWN}")
    missing = [name for name in ("soundfile", RESAMPLER, READERS[kind]) if find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"is not read: this server has no {missing[0]}; its operator may run {INSTALL}")
    return kind


def _kind(data: bytes) -> str | None:
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "wav"
    if data[4:8] == b"ftyp":
        return "mp4"
    if is_opus(data):
        return "opus"
    found = next((kind for magic, kind in _MAGICS.items() if data.startswith(magic)), None)
    return "mp3" if found is None and _is_mpeg_frame(data) else found


def _is_mpeg_frame(data: bytes) -> bool:
    """True if the file begins with the header of a frame of layer 1 to 3, as an mp3 without tags does."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return False
    version, layer, rate, sampling = data[1] >> 3 & 3, data[1] >> 1 & 3, data[2] >> 4, data[2] >> 2 & 3
    return version != 1 and layer != 0 and rate not in (0, 15) and sampling != 3


def _what(data: bytes) -> str:
    if not data:
        return "is empty"
    name = next((name for magic, name in _OTHERS.items() if data.lstrip().startswith(magic)), None)
    return "is no sound that is known" if name is None else f"is {name}, which is not read"


def check_bytes(num_bytes: int, max_bytes: int) -> None:
    """InvalidRequestError for a file that is too large."""
    if num_bytes > max_bytes:
        raise InvalidRequestError(f"has {num_bytes} bytes; a sound may have {max_bytes}")
