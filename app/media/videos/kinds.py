"""Tells a video file's format by its first bytes, whatever the client calls it."""

from __future__ import annotations

from importlib.util import find_spec

from app.errors import UnsupportedError

KNOWN = "mp4, mov, webm and mkv are read"
INSTALL = "pip install 'manta-serve[audio]'"
_OTHERS = {
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture: send it as image_url",
    b"%PDF": "PDF",
    b"PK\3\4": "a zip archive",
    b"\x1f\x8b": "gzip",
    b"fLaC": "a sound",
    b"OggS": "Ogg",
    b"ID3": "a sound",
    b"FLV": "FLV",
    b"0&\xb2u": "WMV",
    b"\0\0\1\xba": "an MPEG program stream",
    b"#EXTM3U": "a playlist",
    b"<": "a page",
    b"{": "JSON",
    b"\x93NUMPY": "a NumPy array",
    b"\x80": "a pickle",
}


def kind_of(data: bytes) -> str:
    """The format of a file, by the name of ffmpeg's demuxer.

    UnsupportedError for what is none of those that are read, or where the library for them is not installed. The
    messages go on behind the name of the field.
    """
    kind = "mp4" if data[4:8] == b"ftyp" else "matroska" if data.startswith(b"\x1aE\xdf\xa3") else None
    if kind is None:
        raise UnsupportedError(f"{_what(data)}; {KNOWN}")
    if find_spec("av") is None:
        raise UnsupportedError(f"is not read: this server has no av; its operator may run {INSTALL}")
    return kind


def _what(data: bytes) -> str:
    if not data:
        return "is empty"
    if data[:4] == b"RIFF":
        name: str | None = {b"AVI ": "AVI", b"WAVE": "a sound", b"WEBP": "a picture"}.get(data[8:12], "RIFF")
    else:
        name = next((name for magic, name in _OTHERS.items() if data.lstrip().startswith(magic)), None)
    return "is no video that is known" if name is None else f"is {name}, which is not read"
