"""Videos that are meant to do harm, made by script: bombs, lies, cut and broken files, sounds, other formats.

Each has a name, the file, and whether it is refused; what is not refused is a video after all. They are meant for a
server that takes `MAX_S` seconds, `MAX_FRAMES` frames and `MAX_PIXELS` pixels in all.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

import numpy as np
from PIL import Image

from tests.media.videos.clips import av, file_of, frames

Case = tuple[str, bytes, bool]
MAX_S = 60.0
MAX_FRAMES = 300
MAX_PIXELS = 30_000_000
TEN_HOURS = 36_000


def cases() -> list[Case]:
    """All of them."""
    return [*_mp4(), *_webm(), *_others()]


def _says(data: bytes, box: bytes, offset: int, *values: int) -> bytes:
    """A file of which numbers of 32 bits in a box are others."""
    at = data.index(box) + 4 + offset
    packed = b"".join(struct.pack(">I", value) for value in values)
    return data[:at] + packed + data[at + len(packed) :]


def _mp4() -> Iterator[Case]:
    whole = file_of(frames(16))
    fast = file_of(frames(16), sound_s=0.5)
    yield "mp4 that is one", whole, False
    yield "mp4 with a sound", fast, False
    for count in (8, 16, 40, 300):
        yield f"mp4 of its first {count} bytes", whole[:count], True
    for share in (2, 3, 10):
        yield f"mp4 cut to 1/{share}", whole[: len(whole) // share], True
    yield "mp4 without its last 20 bytes", whole[:-20], False  # what wrote it says of itself
    media = whole.index(b"mdat") - 4
    size = int.from_bytes(whole[media : media + 4])
    yield "mp4 without its frames", whole[:media] + whole[media + size :], True
    yield "mp4 whose frames are zeros", whole[: media + 8] + bytes(size - 8) + whole[media + size :], True
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, size - 8, np.uint8).tobytes()
    yield "mp4 whose frames are noise", whole[: media + 8] + noise + whole[media + size :], True
    # timescale and duration of the whole and of the track
    yield (
        "mp4 says ten hours",
        _says(_says(whole, b"mvhd", 12, 1000, 1000 * TEN_HOURS), b"mdhd", 12, 1, TEN_HOURS),
        True,
    )
    yield "mp4 says ten hours in its head alone", _says(whole, b"mvhd", 12, 1000, 1000 * TEN_HOURS), False
    yield "mp4 says no rate", _says(whole, b"mdhd", 12, 0), True
    stts = whole.index(b"stts") + 12
    yield "mp4 of 4e9 frames in one row", whole[:stts] + struct.pack(">II", 0xFFFFFFFF, 1) + whole[stts + 8 :], True
    stsz = whole.index(b"stsz") + 12
    yield "mp4 of 4e9 sizes", whole[:stsz] + struct.pack(">I", 0xFFFFFFFF) + whole[stsz + 4 :], True
    for width, height in ((0, 0), (65_535, 65_535), (20_000, 2)):
        avc1 = whole.index(b"avc1", whole.index(b"stsd")) + 4 + 24
        wrong = whole[:avc1] + struct.pack(">HH", width, height) + whole[avc1 + 4 :]
        yield f"mp4 says {width} x {height}, which nobody believes", wrong, False
    yield "mp4 of 301 frames", file_of(frames(1, 16, 16).repeat(301, 0), rate=60), True
    yield "mp4 of 61 s", file_of(frames(61, 16, 16), rate=1), True
    bomb = file_of(np.zeros((40, 1080, 1920, 3), np.uint8), preset="ultrafast", crf="51")
    yield "mp4 bomb of 40 large frames", bomb, True
    yield "mp4 of a sound alone", _sound("mp4", "aac"), True
    yield "mp4 of one frame", file_of(frames(1)), False
    yield "mp4 coded in mpeg2", file_of(frames(8), "mp4", "mpeg2video", rate=25), True
    yield "mp4 with its head alone", whole[whole.index(b"moov") - 4 :], True
    yield "mp4 with 2,000 boxes in boxes", whole[:32] + _nested(2_000) + whole[32:], True
    yield "mp4 behind a picture", _picture("PNG") + whole, True


def _nested(depth: int) -> bytes:
    box = b""
    for _ in range(depth):
        box = struct.pack(">I", len(box) + 8) + b"moov" + box
    return box


def _webm() -> Iterator[Case]:
    whole = file_of(frames(24), "webm", "libvpx", deadline="realtime")
    yield "webm that is one", whole, False
    for count in (4, 5, 40, 200):
        yield f"webm of its first {count} bytes", whole[:count], True
    yield "webm cut to 1/4", whole[: len(whole) // 4], True
    cluster = whole.index(b"\x1f\x43\xb6\x75")
    yield "webm without its frames", whole[:cluster], True
    yield "webm whose frames are zeros", whole[: cluster + 40] + bytes(len(whole) - cluster - 40), True
    duration = whole.index(b"\x44\x89\x88") + 3
    for name, value in (("ten hours", 1e3 * TEN_HOURS), ("nan", float("nan")), ("less than nothing", -1e9)):
        yield (
            f"webm says {name}",
            whole[:duration] + struct.pack(">d", value) + whole[duration + 8 :],
            name == "ten hours",
        )
    yield "webm of a sound alone", _sound("webm", "libopus"), True
    yield "webm whose sizes are endless", whole[:4] + b"\xff" * 12 + whole[16:], True
    yield "webm named mp4", b"\0\0\0\x18ftypisom" + whole, True


def _sound(kind: str, codec: str) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=48_000, layout="mono")
        form = stream.codec_context.format
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 48_000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 48_000
        for one in av.AudioResampler(format=form, layout="mono", rate=48_000).resample(frame):
            for packet in stream.encode(one):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    return out.getvalue()


def _picture(kind: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (32, 32)).save(out, kind)
    return out.getvalue()


def _others() -> Iterator[Case]:
    yield "nothing", b"", True
    for kind in ("PNG", "JPEG", "GIF", "WEBP"):
        yield f"a {kind}", _picture(kind), True
    yield "an AVI", file_of(frames(8), "avi", "mpeg4"), True
    yield "a transport stream", file_of(frames(8), "mpegts", "libx264", rate=25), True
    yield "an FLV", file_of(frames(8), "flv", "libx264"), True
    yield "a wav", b"RIFF\x24\0\0\0WAVEfmt " + bytes(32), True
    yield "a page", b"<html>" + bytes(99), True
    yield "a playlist", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", True
    yield "a list of files", b"ffconcat version 1.0\nfile /etc/passwd\n", True
    yield "zeros", bytes(4096), True
    yield "a pickle", b"\x80\x04" + bytes(64), True
    yield "an AVIF", b"\0\0\0\x1cftypavif\0\0\0\0avifmif1" + bytes(64), True
