"""Videos from files to pixels and identity, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from app.errors import InvalidRequestError, UnsupportedError
from app.media.picture import Picture
from app.media.processors.base import resized
from app.media.reader import MediaReader
from app.media.videos.clip import Clip, RawVideo
from app.media.videos.qwen_vl import Qwen2VLVideos, Qwen3VLVideos
from app.media.videos.video_processor import VideoProcessor
from tests.media.media_model import reader
from tests.media.videos.clips import decoded, file_of, frames

SMALL = {"size": {"shortest_edge": 784, "longest_edge": 784 * 64}, "patch_size": 14}
TOKENS = {"placeholder": "P", "begin": "B", "end": "E"}
OLDER = Qwen2VLVideos({**Qwen2VLVideos.settings_of(SMALL, {}), **TOKENS})
NEWER = Qwen3VLVideos({**Qwen3VLVideos.settings_of(SMALL, {}), **TOKENS})
FILE = file_of(frames(24))


@pytest.fixture(scope="module")
def own() -> Iterator[MediaReader]:
    own = reader(max_decoders=1)
    yield own
    own.close()


def read(
    own: MediaReader, video: Any = FILE, processor: VideoProcessor = OLDER, most: int = 9999, tenant: str = ""
) -> Picture:
    family = "qwen2_vl" if processor is OLDER or type(processor) is Qwen2VLVideos else "qwen3_vl"
    return own.read_video(video, family, processor, most, tenant)


@pytest.mark.parametrize("processor", [OLDER, NEWER])
def test_pixels_are_those_of_chosen_frames(own: MediaReader, processor: VideoProcessor) -> None:
    shown = read(own, processor=processor)
    clip = Clip((64, 48), 24, 8.0)
    layout = processor.layout(clip)
    assert (shown.kind, shown.layout) == ("video", layout)
    chosen = np.stack([resized(decoded(FILE)[i], layout.size, 3) for i in processor.indices(clip)])
    assert shown.pixels == np.ascontiguousarray(processor.pixels(chosen, layout)).tobytes()
    item = shown.item(5, 9)
    assert (item.grid, item.seconds_per_frame, item.shape) == (layout.grid, layout.seconds_per_frame, shown.shape)


def test_identity(own: MediaReader) -> None:
    """The same file and settings are one; another tenant's, other frames, other times, other settings are not."""
    slower = file_of(frames(24), rate=4)
    finer = Qwen2VLVideos({**OLDER.settings, "fps": 4.0})
    same, *others = [
        *(read(own), read(own, tenant="b"), read(own, slower), read(own, processor=NEWER), read(own, processor=finer)),
        read(own, file_of(frames(24)[::-1])),
    ]
    assert read(own).digest == same.digest
    assert len({same.digest, *(one.digest for one in others)}) == 6
    still = frames(1).repeat(12, 0)  # whose pixels say nothing of its times
    raws = [RawVideo(Clip((64, 48), 12, fps, is_chosen=True), still.tobytes()) for fps in (2.0, 4.0)]
    assert len({read(own, raw).digest for raw in raws}) == 2


def test_frames_that_were_chosen_are_shown_all(own: MediaReader) -> None:
    shown = frames(5)
    all_of_them = read(own, RawVideo(Clip((64, 48), 5, 24.0, is_chosen=True), shown.tobytes()))
    assert all_of_them.layout.grid[0] == 3
    some = read(own, RawVideo(Clip((64, 48), 24, 24.0), frames(24).tobytes()))
    assert some.layout.grid[0] == 2


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"max_video_s": 2.5}, "lasts 3 s; at most 2.5 s"),
    ({"max_video_frames": 23}, "has 24 frames; at most 23"),
    (
        {"max_video_pixels": 64 * 48 * 20 - 1},
        "has 21 frames of 64 x 48 pixels; at most 61439 pixels in all are decoded",
    ),
    ({"max_image_pixels": 64 * 48 - 1}, "has 64 x 48 pixels; at most 3071"),
    ({"max_image_side": 63}, "63 along a side"),
    ({"max_prompt_bytes": 1000}, "bytes; a prompt may have 1000"),
]


@pytest.mark.parametrize(("options", "says"), LIMITS, ids=[next(iter(options)) for options, _ in LIMITS])
def test_limits(options: dict[str, Any], says: str) -> None:
    own = reader(max_decoders=1, **options)
    try:
        with pytest.raises(InvalidRequestError) as raised:
            read(own)
        assert says in raised.value.message
    finally:
        own.close()


def test_tokens_are_bounded_before_frames_are_decoded(own: MediaReader) -> None:
    most = OLDER.layout(Clip((64, 48), 24, 8.0)).num_tokens - 1
    with pytest.raises(InvalidRequestError, match=f"which are {most + 1} tokens; at most {most} fit: send a shorter"):
        read(own, most=most, tenant="another")


def test_other_files_are_refused(own: MediaReader) -> None:
    with pytest.raises(UnsupportedError, match="is AVI, which is not read; mp4, mov, webm and mkv are read"):
        read(own, b"RIFF\0\0\0\0AVI LIST")
