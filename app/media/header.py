"""Reads a picture's format and size from its first bytes, before anything decodes it.

Pillow would tell, too, but for WebP it allocates the whole canvas first. The format is what the magic bytes say,
whatever the client calls it; who decodes is held to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.errors import InvalidRequestError, UnsupportedError

_KNOWN = "PNG, JPEG, WebP and GIF are read"
_OTHERS = {
    b"<svg": "SVG",
    b"<?xml": "XML",
    b"<!DOCTYPE": "a page",
    b"%PDF": "PDF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"BM": "BMP",
    b"8BPS": "PSD",
    b"\0\0\1\0": "ICO",
    b"\x93NUMPY": "a NumPy array",
    b"PK\3\4": "a zip archive, as torch.save writes them",
    b"\x80": "a pickle, as torch.save wrote them",
    b"\x1f\x8b": "gzip",
    b"%!PS": "PostScript",
    b"\x1aE\xdf\xa3": "a video",
}
# JPEG's markers that begin a frame; C4, C8 and CC are something else.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MOST_FILL = 4096  # bytes between two segments
_MAX_SEGMENTS = 4096  # before the frame: comments, profiles, thumbnails


@dataclass(slots=True, frozen=True)
class Header:
    """A picture's format, by Pillow's name, and its size as stored: before it is turned as EXIF says."""

    format: str
    width: int
    height: int


def read_header(data: bytes, max_pixels: int, max_side: int) -> Header:
    """The header of a picture that may be decoded.

    UnsupportedError for what is none of the formats, InvalidRequestError for a header that is malformed or too large a
    picture. The messages go on behind the name of the field.
    """
    read = next((read for magic, read in _READERS.items() if data.startswith(magic)), None)
    if read is None:
        raise UnsupportedError(f"{_what(data)}; {_KNOWN}")
    try:
        header = read(data)
    except (IndexError, ValueError):
        raise InvalidRequestError("is malformed: its header is cut short or says no size") from None
    check_size(header.width, header.height, max_pixels, max_side)
    return header


def check_size(width: int, height: int, max_pixels: int, max_side: int) -> None:
    """InvalidRequestError for a size that may not be decoded."""
    if not (width and height):
        raise InvalidRequestError(f"is malformed: it has {width} x {height} pixels")
    if width * height > max_pixels or max(width, height) > max_side:
        what = f"at most {max_pixels} in all and {max_side} along a side"
        raise InvalidRequestError(f"has {width} x {height} pixels; {what}")


def _what(data: bytes) -> str:
    if not data:
        return "is empty"
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    if data[4:8] == b"ftyp":
        return "is of a format that is not read (AVIF, HEIC or a video)"
    name = next((name for magic, name in _OTHERS.items() if start.lower().startswith(magic.lower())), None)
    return "is no picture that is known" if name is None else f"is {name}, which is not read"


def _png(data: bytes) -> Header:
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise ValueError
    return Header("PNG", int.from_bytes(data[16:20]), int.from_bytes(data[20:24]))


def _gif(data: bytes) -> Header:
    return Header("GIF", _little(data, 6, 2), _little(data, 8, 2))


def _jpeg(data: bytes) -> Header:
    at = 2
    for _ in range(_MAX_SEGMENTS):
        at = data.index(b"\xff", at, at + _MOST_FILL)  # some cameras leave bytes between segments
        fill = data[at : at + _MOST_FILL]
        at += len(fill) - len(fill.lstrip(b"\xff"))
        marker = data[at]
        if marker in _FRAMES:
            return Header("JPEG", _big(data, at + 6), _big(data, at + 4))
        if marker == 0xDA:  # the scan begins: too late for a frame
            break
        at += 1
        if not (0xD0 <= marker <= 0xD8 or marker == 1):
            at += max(2, _big(data, at))
    raise ValueError


def _webp(data: bytes) -> Header:
    if data[8:12] != b"WEBP":
        raise ValueError
    kind = data[12:16]
    if kind == b"VP8 ":
        return Header("WEBP", _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF)
    if kind == b"VP8L":
        bits = _little(data, 21, 4)
        return Header("WEBP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        return Header("WEBP", _little(data, 24, 3) + 1, _little(data, 27, 3) + 1)
    raise ValueError


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_bytes(data, at, size), "little")


def _big(data: bytes, at: int) -> int:
    return int.from_bytes(_bytes(data, at, 2))


def _bytes(data: bytes, at: int, size: int) -> bytes:
    found = data[at : at + size]
    if len(found) < size:
        raise IndexError
    return found


_READERS: dict[bytes, Callable[[bytes], Header]] = {
    b"\x89PNG\r\n\x1a\n": _png,
    b"\xff\xd8\xff": _jpeg,
    b"GIF87a": _gif,
    b"GIF89a": _gif,
    b"RIFF": _webp,
}
