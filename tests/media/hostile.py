"""Media that are meant to do harm, made by script: bombs, lies, cut and broken files, other formats, other addresses.

Each has a name, the URL that a request brings, and whether it is refused; what is not refused is a picture after all.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator

from PIL import Image

from tests.media.pictures import file_of, picture

Case = tuple[str, str, bool]
PNG = b"\x89PNG\r\n\x1a\n"


def cases() -> list[Case]:
    """All of them."""
    files = (*_png(), *_jpeg(), *_gif(), *_webp(), *_others())
    return [(name, _url(data), refused) for name, data, refused in files] + list(_addresses())


def _url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def _chunk(kind: bytes, data: bytes, crc: int | None = None) -> bytes:
    return (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data) if crc is None else crc)
    )


def _header(width: int, height: int, depth: int = 8, color: int = 2, interlace: int = 0, method: int = 0) -> bytes:
    return _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, method, 0, interlace))


def _rows(width: int, height: int, channels: int = 3) -> bytes:
    return _chunk(b"IDAT", zlib.compress(b"\0" * (height * (width * channels + 1)), 9))


def _png() -> Iterator[tuple[str, bytes, bool]]:
    end = _chunk(b"IEND", b"")
    for width, height in (
        (65_535, 65_535),
        (1 << 31, 1 << 31),
        (16_385, 1),
        (1, 16_385),
        (5_745, 5_745),
        (0, 9),
        (9, 0),
    ):
        yield f"png says {width} x {height}", PNG + _header(width, height) + _rows(4, 4) + end, True
    whole = file_of(picture(64, 64))
    for share in (0, 1, 2, 4, 8, 16):
        yield f"png cut to {share}/20", whole[: max(9, len(whole) * share // 20)], True
    good = _header(8, 8)
    yield "png without pixels", PNG + good + end, True
    yield "png of a wrong sum", PNG + _chunk(b"IHDR", good[8:21], 1) + _rows(8, 8) + end, True
    yield "png of garbled pixels", PNG + good + _chunk(b"IDAT", b"\x78\x9c" + b"\xff" * 99) + end, True
    yield "png of too few pixels", PNG + _header(99, 99) + _rows(8, 8) + end, True
    yield "png of 3 bits", PNG + _header(8, 8, depth=3) + _rows(8, 8) + end, True
    yield "png of colour 5", PNG + _header(8, 8, color=5) + _rows(8, 8) + end, True
    yield "png of method 9", PNG + _header(8, 8, method=9) + _rows(8, 8) + end, False
    yield "png of a chunk without end", PNG + good + b"\xff\xff\xff\xffIDAT", True
    yield "png that begins with pixels", PNG + _rows(8, 8) + good + end, True
    bomb = zlib.compress(b"\0" * (64 << 20), 9)
    yield "png text bomb", PNG + good + _chunk(b"zTXt", b"a\0\0" + bomb) + _rows(8, 8) + end, True
    yield "png many text bombs", PNG + good + _chunk(b"zTXt", b"a\0\0" + bomb) * 20 + _rows(8, 8) + end, True
    yield "png profile bomb", PNG + good + _chunk(b"iCCP", b"a\0\0" + bomb) + _rows(8, 8) + end, True
    yield "png of more pixels than it says", PNG + good + _chunk(b"IDAT", bomb) + end, False
    yield "png of a long row of small chunks", PNG + good + _chunk(b"teXt", b"a\0b") * 20_000 + _rows(8, 8) + end, False
    yield "png of two headers", PNG + good + _header(30_000, 30_000) + _rows(8, 8) + end, True
    yield "png that is a zip, too", file_of(picture()) + b"PK\3\4" + b"\0" * 99 + b"PK\5\6" + b"\0" * 18, False
    yield "png that is a page, too", PNG + good + _chunk(b"teXt", b"a\0<script>") + _rows(8, 8) + end, False
    yield "png of 16 bits", file_of(Image.new("I;16", (9, 9), 40_000)), False
    moving = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(200)]
    yield "png that moves", file_of(moving[0], "PNG", save_all=True, append_images=moving[1:]), False
    yield "png of another turn", file_of(picture(), exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40), False


def _jpeg() -> Iterator[tuple[str, bytes, bool]]:
    whole = file_of(picture(64, 64), "JPEG")
    frame = whole.index(b"\xff\xc0")
    for width, height in ((65_535, 65_535), (65_500, 505), (0, 9), (9, 0)):
        said = whole[: frame + 5] + struct.pack(">HH", height, width) + whole[frame + 9 :]
        yield f"jpeg says {width} x {height}", said, True
    for share in (1, 4, 8, 12, 16):
        yield f"jpeg cut to {share}/20", whole[: len(whole) * share // 20], True
    yield "jpeg of marks alone", b"\xff\xd8" + b"\xff" * 9_999, True
    yield "jpeg without a frame", b"\xff\xd8\xff\xda\0\4ab", True
    yield "jpeg of empty segments", b"\xff\xd8" + b"\xff\xe0\0\0" * 9_999, True
    yield "jpeg of endless comments", b"\xff\xd8" + b"\xff\xfe\xff\xff" + b"a" * 65_533 + b"\xff\xfe\xff\xff", True
    yield "jpeg of arithmetic codes", whole[:frame] + b"\xff\xc9" + whole[frame + 2 :], False
    yield "jpeg of 12 bits", whole[: frame + 4] + b"\x0c" + whole[frame + 5 :], True
    yield "jpeg of 9 components", whole[: frame + 9] + b"\x09" + whole[frame + 10 :], True
    yield "jpeg of garbled tables", whole.replace(b"\xff\xc4", b"\xff\xc5", 1), True
    exif = b"Exif\0\0II*\0\x08\0\0\0" + b"\xff\xff" + b"\x12\1\3\0\1\0\0\0\x63\0\0\0" * 99
    yield "jpeg of a garbled turn", file_of(picture(), "JPEG", exif=exif), False
    yield "jpeg with a page behind", whole + b"<html><script>alert(1)</script>", False
    yield "jpeg in four inks", file_of(picture(mode="CMYK"), "JPEG"), False


def _gif() -> Iterator[tuple[str, bytes, bool]]:
    whole = file_of(picture(64, 64), "GIF")
    for width, height in ((65_535, 65_535), (0, 0), (16_385, 2)):
        yield f"gif says {width} x {height}", whole[:6] + struct.pack("<HH", width, height) + whole[10:], True
    for share in (2, 6, 10):
        yield f"gif cut to {share}/20", whole[: len(whole) * share // 20], True
    screen = b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0x80, 0, 0) + b"\0" * 6
    yield "gif without a frame", screen + b";", True
    large = b"," + struct.pack("<HHHHB", 0, 0, 16_000, 16_000, 0) + b"\2\2\x4c\1\0;"
    yield "gif of a frame larger than its screen", screen + large, True
    yield (
        "gif of a frame far off",
        screen + b"," + struct.pack("<HHHHB", 65_000, 65_000, 500, 500, 0) + b"\2\2\x4c\1\0;",
        True,
    )
    yield "gif of wide codes", screen + b"," + struct.pack("<HHHHB", 0, 0, 4, 4, 0) + b"\xff\2\x4c\1\0;", True
    yield "gif of endless comments", screen + b"!\xfe" + (b"\xff" + b"a" * 255) * 4_000, True
    frames = [Image.new("P", (8, 8), i % 200) for i in range(500)]
    yield "gif of 500 frames", file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]), False


def _webp() -> Iterator[tuple[str, bytes, bool]]:
    whole = file_of(picture(64, 64), "WEBP")

    def riff(kind: bytes, data: bytes) -> bytes:
        body = b"WEBP" + kind + struct.pack("<I", len(data)) + data
        return b"RIFF" + struct.pack("<I", len(body)) + body

    yield "webp says 2^24 x 2^24", riff(b"VP8X", b"\x10\0\0\0" + b"\xff" * 6), True
    yield "webp says 16384 x 16384", riff(b"VP8L", b"\x2f\xff\xff\xff\x0f" + b"\0" * 99), True
    yield "webp of nothing", riff(b"VP8 ", b"\0" * 30), True
    yield "webp of another kind", riff(b"ABCD", b"\0" * 30), True
    yield "webp that is a wave", b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40, True
    yield "webp canvas without a picture", riff(b"VP8X", b"\0\0\0\0\7\0\0\7\0\0"), True
    yield "webp of garbled pixels", riff(b"VP8L", b"\x2f\x07\xc0\1\0" + b"\xa5" * 40), True
    for share in (1, 5, 10, 15):
        yield f"webp cut to {share}/20", whole[: len(whole) * share // 20], True
    frames = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(100)]
    yield "webp that moves", file_of(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=1), False


def _others() -> Iterator[tuple[str, bytes, bool]]:
    entity = b'<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
    named = {
        "nothing": b"",
        "one byte": b"\x89",
        "text": b"hello",
        "zeros": b"\0" * 4_096,
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        "svg behind white space": b"\xef\xbb\xbf \n\t<SVG/>",
        "svg with entities": b"<?xml version='1.0'?>" + entity + b"<svg>&b;</svg>",
        "svg that asks": b'<svg><image href="http://169.254.169.254/"/></svg>',
        "page": b"<!DOCTYPE html><html></html>",
        "pdf": b"%PDF-1.7\n",
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n",
        "tiff": b"II*\0\x08\0\0\0" + b"\xff" * 40,
        "big tiff": b"MM\0*\0\0\0\x08",
        "bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 70, 0, 0, 54, 40, 1 << 30, 1 << 30, 1, 24, 0, 0, 0, 0, 0, 0),
        "ico": b"\0\0\1\0\1\0\0\0\0\0",
        "psd": b"8BPS\0\1",
        "pixmap": b"P6 99999 99999 255\n",
        "bitmap as text": b"#define a_width 99999\n#define a_height 99999\n",
        "avif": b"\0\0\0\x20ftypavif" + b"\0" * 20,
        "heic": b"\0\0\0\x18ftypheic" + b"\0" * 20,
        "video": b"\0\0\0\x18ftypmp42" + b"\0" * 20,
        "matroska": b"\x1aE\xdf\xa3" + b"\0" * 20,
        "avi": b"RIFF\0\0\0\0AVI LIST",
        "gzip bomb": zlib.compress(b"\0" * (1 << 24), 9, wbits=31),
        "zip": b"PK\3\4" + b"\0" * 26,
        "torch.save": b"PK\3\4\0\0\x08\x08archive/data.pkl",
        "pickle": b"\x80\4cos\nsystem\n(S'id'\ntR.",
        "numpy": b"\x93NUMPY\1\0",
        "safetensors": struct.pack("<Q", 1 << 60) + b"{}",
        "jpeg 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
        "elf": b"\x7fELF\2\1\1",
        "script": b"#!/bin/sh\nid\n",
    }
    yield from ((name, data, True) for name, data in named.items())


def _addresses() -> Iterator[Case]:
    whole = base64.b64encode(file_of(picture())).decode()
    yield "data of a lying type", f"data:image/svg+xml;base64,{whole}", False
    yield "data without a type", f"data:;base64,{whole}", False
    hosts = (
        *("127.0.0.1", "localhost", "10.0.0.1", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0"),
        *("0", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[fc00::1]"),
        "[fe80::1%25eth0]",
        *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "metadata.google.internal", "127.0.0.1.nip.io", "ray-head:8265"),
        *("images.example@127.0.0.1", "images.example:22", "127.0.0.1#@images.example", "images.example.evil.example"),
        *("images.example%2f@evil.example", "evil.example\\@images.example", "①②⑦.⓪.⓪.①", "xn--a", "a" * 9_000),
    )
    for host in hosts:
        yield f"http to {host[:32]}", f"http://{host}/a.png", True
    for url in (
        *("file:///etc/passwd", "ftp://images.example/a.png", "gopher://127.0.0.1:6379/_INFO", "javascript:alert(1)"),
        *("blob:abc", "//images.example/a.png", "/etc/passwd", "a.png", "", "data:", "data:image/png;base64", "data:,"),
        *(
            "data:image/png;base64,====",
            "data:image/png;base64,ab\ncd",
            "data:image/png;base64,äöü",
        ),
        "data:image/png,%",
        "data:image/png;base64," + "A" * (28 << 20),
    ):
        yield f"url {url[:40]!r}", url, True
