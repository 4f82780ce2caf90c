"""Videos of `LLM`'s prompts: files in bytes or as data URLs, and frames in arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from app.errors import InvalidRequestError
from app.media.source import file_of
from app.media.videos.clip import USUAL_RATE, Clip, RawVideo

_FORMS = (
    "a video is the bytes of a file, a data URL, frames (an array of uint8 [N, H, W, 3], or a list of pictures of one "
    'size), or a pair of frames and {"fps": how many go by in a second}'
)


def video_of(video: Any, max_bytes: int) -> bytes | RawVideo:
    """A video as it is read. Frames are shown all, as vLLM does, unless they come with {"do_sample_frames": True}.

    Messages of errors go on behind the name of the field.
    """
    if isinstance(video, str):
        return file_of(video, max_bytes, "video")
    if isinstance(video, bytes):
        return video
    given, said = video if isinstance(video, tuple) and len(video) == 2 else (video, {})
    frames = _stacked(given) if isinstance(given, list) else given
    is_frames = isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.ndim == 4
    if not is_frames or frames.shape[3] != 3 or not frames.size or not isinstance(said, Mapping):
        raise InvalidRequestError(f"{_FORMS}, not {type(video).__name__}")
    fps = said.get("fps") or USUAL_RATE
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= 1000:
        raise InvalidRequestError(f"fps is {fps!r:.40}, not a number of frames a second up to 1000")
    count, height, width, _ = frames.shape
    clip = Clip((width, height), count, float(fps), is_chosen=not said.get("do_sample_frames", False))
    return RawVideo(clip, np.ascontiguousarray(frames).tobytes())


def _stacked(pictures: list[Any]) -> Any:
    frames = [_frame(one) for one in pictures]
    return np.stack(frames) if len({frame.shape for frame in frames}) == 1 else None


def _frame(picture: Any) -> Any:
    return np.asarray(picture.convert("RGB")) if isinstance(picture, Image.Image) else np.asarray(picture)
