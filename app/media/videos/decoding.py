"""A video file's frames by PyAV. Runs in a process that may be killed.

What a header says is bounded, and then counted: packets are read through before any frame but the first is decoded.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from app.errors import InvalidRequestError
from app.media.header import check_size
from app.media.processors.base import Pixels, Size, resized
from app.media.videos.clip import Clip

# Loaded now, as the process opens no files later; None where it is not installed: who asks has looked.
av: Any = None if find_spec("av") is None else import_module("av")
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg", "libvpx", "libvpx-vp9"})
MAX_RATE = 1_000.0  # frames a second that may be believed
MISSING_SHARE = 50  # one of so many packets may give no frame
CUT_S = 2.0  # of a video that its header says and that are not there, beside a tenth of it
_NAMES = {"matroska": "webm"}  # what the format is called to users
_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


class DecodingError(Exception):
    """The file is not what its header promised."""


@dataclass(slots=True, frozen=True)
class VideoBounds:
    """Bounds one video's file."""

    max_s: float
    max_frames: int
    max_pixels: int  # of one frame
    max_side: int

    def check_seconds(self, seconds: float) -> None:
        """DecodingError for a video that is too long."""
        if seconds > self.max_s:
            raise DecodingError(f"lasts {seconds:.0f} s; at most {self.max_s:g} s")


def probe(data: bytes, kind: str, bounds: VideoBounds) -> Clip:
    """Says what is in a file: its first frame is decoded, and its packets are counted.

    DecodingError says what is wrong with it, InvalidRequestError that its frames are too large.
    """
    with _reasons(kind):
        with _opened(data, kind) as (container, stream):
            _check(container, stream, bounds)
            size = _first_size(container, stream, bounds)
        with _opened(data, kind) as (container, stream):
            num_frames, seconds = _counted(container, stream, bounds)
            rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate else 0.0
        if not 0 < fps <= MAX_RATE:
            fps = min(MAX_RATE, num_frames / seconds) if seconds > 0 else 1.0
        bounds.check_seconds(num_frames / fps)
        return Clip(size, num_frames, fps)


def chosen_frames(data: bytes, kind: str, clip: Clip, indices: Sequence[int], size: Size, resample: int) -> Pixels:
    """The frames of these indices, which ascend, at another size: [n, H, W, 3]. DecodingError as by `probe`."""
    out = np.empty((len(indices), size[1], size[0], 3), np.uint8)
    filled = count = 0
    with _reasons(kind), _opened(data, kind) as (container, stream):
        for frame in container.decode(stream):
            if indices[filled] == count:
                image = resized(_rgb(frame, clip.size), size, resample)
                while filled < len(indices) and indices[filled] == count:
                    out[filled] = image
                    filled += 1
            count += 1
            if filled == len(indices):
                return out
    if not filled or count < clip.num_frames - max(2, clip.num_frames // MISSING_SHARE):
        raise DecodingError(f"is damaged: {count} of its {clip.num_frames} frames can be decoded")
    out[filled:] = out[filled - 1]  # packets at its end that gave no frame of their own
    return out


@contextmanager
def _reasons(kind: str) -> Iterator[None]:
    """Says of a library's errors that the file is malformed."""
    try:
        yield
    except (MemoryError, DecodingError, InvalidRequestError):
        raise
    except Exception as error:  # libraries raise of their own, and the process is one that may die
        raise DecodingError(f"is a malformed {_NAMES.get(kind, kind)}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    said = _NUMBER.sub("", str(error).partition(": '<")[0]).rpartition(">: ")[2].rstrip(".")
    return f"{said:.120}" if said and "0x" not in said else type(error).__name__


@contextmanager
def _opened(data: bytes, kind: str) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of pictures. The format is given, so that ffmpeg tries no other."""
    with av.open(io.BytesIO(data), format=kind, metadata_errors="ignore") as container:
        streams = [one for one in container.streams.video if not one.disposition & one.disposition.attached_pic]
        if not streams:
            has = "a sound without pictures" if container.streams.audio else "a container without pictures"
            raise DecodingError(f"is {has}")
        stream = streams[0]
        if stream.codec_context is None or stream.codec_context.name not in CODECS:
            name = "an unknown way" if stream.codec_context is None else stream.codec_context.name
            raise DecodingError(f"is coded in {name}, which is not read; h264, hevc, vp8, vp9, av1 and mpeg4 are")
        stream.codec_context.thread_count = 1
        yield container, stream


def _check(container: Any, stream: Any, bounds: VideoBounds) -> None:
    """Refuse what the header alone forbids."""
    context = stream.codec_context
    if context.width or context.height:  # some formats say it with the first frame alone
        check_size(context.width, context.height, bounds.max_pixels, bounds.max_side)
    if container.duration is not None:
        bounds.check_seconds(container.duration / av.time_base)
    if stream.frames > bounds.max_frames:
        raise DecodingError(f"has {stream.frames} frames; at most {bounds.max_frames}")
    context.options = {"max_pixels": str(bounds.max_pixels)}


def _first_size(container: Any, stream: Any, bounds: VideoBounds) -> Size:
    for frame in container.decode(stream):
        check_size(frame.width, frame.height, bounds.max_pixels, bounds.max_side)
        return (frame.height, frame.width) if _turns(frame) % 2 else (frame.width, frame.height)
    raise DecodingError("has no frames")


def _counted(container: Any, stream: Any, bounds: VideoBounds) -> tuple[int, float]:
    """Packets that give a frame each, and the seconds that they last. DecodingError where the file is cut short."""
    count = num_packets = 0
    begin, end, own_end = float("inf"), 0.0, 0.0
    for packet in container.demux():
        if not packet.size or packet.time_base is None:
            continue
        if packet.pts is not None:
            at = float(packet.pts * packet.time_base)
            until = at + float((packet.duration or 0) * packet.time_base)
            begin, end = min(begin, at), max(end, until)
        if packet.stream.index == stream.index:
            num_packets += 1
            count += _is_shown(stream, packet)
            own_end = end
            if num_packets > bounds.max_frames:
                raise DecodingError(f"has more than {bounds.max_frames} frames")
    if not count:
        raise DecodingError("has no frames")
    if num_packets < stream.frames:
        raise DecodingError(f"is cut short: it says {stream.frames} frames, and has {num_packets}")
    said = 0.0 if container.duration is None else container.duration / av.time_base
    if said - end > CUT_S + said / 10:
        raise DecodingError(f"is cut short: it says {said:.1f} s, and has {end:.1f} s")
    return count, max(0.0, own_end - min(begin, own_end))


def _is_shown(stream: Any, packet: Any) -> bool:
    """True but for packets that are decoded only for others' sake: by an edit list, or VP8's bit."""
    if packet.is_discard:
        return False
    return stream.codec_context.name not in ("vp8", "libvpx") or bool(bytes(packet)[0] & 0x10)


def _turns(frame: Any) -> int:
    """Quarter turns, counterclockwise, after which it stands upright."""
    turns: int = round(frame.rotation / 90) % 4
    return turns


def _rgb(frame: Any, size: Size) -> Pixels:
    """A frame [H, W, 3], upright."""
    pixels: Pixels = np.rot90(frame.to_ndarray(format="rgb24"), _turns(frame))
    if pixels.shape[1::-1] != size:
        raise DecodingError(f"changes the size of its frames from {size[0]} x {size[1]}")
    return np.ascontiguousarray(pixels)
