"""Formats and sizes from headers, judged by Pillow over files that it wrote."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from app.errors import InvalidRequestError, UnsupportedError
from app.media.header import Header, read_header
from tests.media.pictures import file_of, picture

FORMS = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True, "comment": b"x" * 999}),
    ("GIF", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),
]


@pytest.mark.parametrize(("kind", "options"), FORMS, ids=[f"{kind}-{'-'.join(o)}" for kind, o in FORMS])
@pytest.mark.parametrize("size", [(1, 1), (301, 77)])
def test_sizes_are_pillow_s(kind: str, options: dict, size: tuple[int, int]) -> None:
    data = file_of(picture(*size), kind, **options)
    with Image.open(io.BytesIO(data)) as judge:
        assert read_header(data, 1 << 20, 1 << 10) == Header(judge.format or "", *judge.size)
    for cut in range(8, 10):
        with pytest.raises(InvalidRequestError, match="is malformed"):
            read_header(data[:cut], 1 << 20, 1 << 10)


def test_what_is_too_large_or_no_picture_is_refused_by_its_header() -> None:
    data = file_of(picture(30, 20))
    with pytest.raises(InvalidRequestError, match="has 30 x 20 pixels; at most 599 in all and 99 along a side"):
        read_header(data, 599, 99)
    with pytest.raises(InvalidRequestError, match="at most 999 in all and 29 along a side"):
        read_header(data, 999, 29)
    for start, name in ((b" \n<SVG xmlns", "SVG"), (b"PK\x03\x04", "torch.save"), (b"", "empty"), (b"BM123", "BMP")):
        with pytest.raises(UnsupportedError, match=name):
            read_header(start, 1, 1)


@pytest.mark.parametrize("fill", [b"\xff\xe0\x00\x02" + bytes(1 << 20), b"\xff" * (1 << 20)])
def test_what_stands_between_segments_is_bounded(fill: bytes) -> None:
    """Or 20 MiB of it hold the event loop for most of a second."""
    with pytest.raises(InvalidRequestError):
        read_header(b"\xff\xd8" + fill + file_of(picture(), "JPEG")[2:], 1 << 24, 1 << 14)
