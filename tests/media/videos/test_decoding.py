"""Frames of files of every kind are those of PyAV's own loop; what is counted is what is there."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from app.media.videos.clip import Clip
from app.media.videos.decoding import DecodingError, VideoBounds, chosen_frames, probe
from tests.media.videos.clips import decoded, file_of, frames

BOUNDS = VideoBounds(60.0, 1000, 1 << 20, 4096)
KINDS = [
    ("mp4", "libx264", {"bf": "3", "g": "5"}),
    ("mp4", "mpeg4", {}),
    ("matroska", "libx264", {}),
    ("webm", "libvpx-vp9", {"deadline": "realtime"}),
    # Frames that are only decoded for others' sake have packets of their own.
    ("webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "10", "deadline": "good", "cpu-used": "5"}),
]


@pytest.mark.parametrize(("kind", "codec", "options"), KINDS)
def test_frames_are_those_of_the_file(kind: str, codec: str, options: dict[str, str]) -> None:
    data = file_of(frames(20), kind, codec, **options)
    expected = decoded(data)
    demuxer = "mp4" if kind == "mp4" else "matroska"
    clip = probe(data, demuxer, BOUNDS)
    assert clip == Clip((64, 48), len(expected), 8.0)
    chosen = [0, 3, 3, 11, 19]
    assert (chosen_frames(data, demuxer, clip, chosen, (64, 48), 3) == expected[chosen]).all()


def test_a_sound_beside_it_changes_nothing() -> None:
    data = file_of(frames(12), sound_s=3.0)
    assert probe(data, "mp4", BOUNDS) == Clip((64, 48), 12, 8.0)
    webm = file_of(frames(12), "webm", "libvpx", sound_s=2.0)
    assert probe(webm, "matroska", BOUNDS).num_frames == 12


def test_a_video_that_lies_on_its_side_is_turned() -> None:
    data = bytearray(file_of(frames(4)))
    matrix = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    quarter = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    at = data.index(matrix, data.index(b"tkhd"))
    data[at : at + 36] = quarter
    clip = probe(bytes(data), "mp4", BOUNDS)
    assert clip.size == (48, 64)
    found = chosen_frames(bytes(data), "mp4", clip, [0, 1, 2, 3], (48, 64), 3)
    expected = np.stack([np.rot90(one, -1) for one in decoded(bytes(data))])  # clockwise, as players show it
    assert (found == expected).all()


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        (VideoBounds(1.0, 1000, 1 << 20, 4096), "lasts 2 s; at most 1 s"),
        (VideoBounds(60.0, 15, 1 << 20, 4096), "has 16 frames; at most 15"),
        (VideoBounds(60.0, 1000, 64 * 48 - 1, 4096), "has 64 x 48 pixels; at most 3071"),
        (VideoBounds(60.0, 1000, 1 << 20, 63), "63 along a side"),
    ],
)
def test_bounds_hold_before_decoding(bounds: VideoBounds, says: str) -> None:
    from app.errors import InvalidRequestError

    data = file_of(frames(16))
    with pytest.raises((DecodingError, InvalidRequestError)) as raised:
        probe(data, "mp4", bounds)
    assert says in str(getattr(raised.value, "message", raised.value))
