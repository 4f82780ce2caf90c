"""The process in which videos are decoded: it may be killed, the server may not.

Asked a job (a line of JSON, then the video's file, or frames), it answers with a line of JSON (what the file holds, or
the shape of its pixels, or an error), then pixels. Run as `python -m app.media.videos.video_process MEMORY_BYTES`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from functools import lru_cache
from typing import Any

import numpy as np

from app.errors import InvalidRequestError
from app.limited_process import allow, serve
from app.media.processors.base import Layout, Pixels, resized
from app.media.videos.clip import Clip
from app.media.videos.decoding import DecodingError, VideoBounds, chosen_frames, probe
from app.media.videos.video_processor import VideoProcessor
from app.media.videos.video_processors import VIDEO_PROCESSORS

MAX_OPEN_FILES = 64


def main() -> None:
    """Answer jobs until the input ends."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    serve(int(sys.argv[1]), _answer)


def _answer(asked: bytes) -> bytes:
    line, _, data = asked.partition(b"\n")
    job = json.loads(line)
    allow(job["most_s"])
    try:
        if job["do"] == "probe":
            return json.dumps(probe(data, job["kind"], VideoBounds(**job["bounds"])).as_json()).encode()
        return _prepared(job, data)
    except MemoryError:
        os._exit(1)  # what was computed so far cannot be told from what was not
    except DecodingError as error:
        return json.dumps({"error": str(error)}).encode()
    except InvalidRequestError as error:
        return json.dumps({"error": error.message}).encode()


def _prepared(job: dict[str, Any], data: bytes) -> bytes:
    processor = _processor(job["family"], json.dumps(job["settings"]))
    clip = Clip.of_json(job["clip"])
    layout = processor.layout(clip)
    pixels = np.ascontiguousarray(processor.pixels(_frames(job["kind"], data, clip, processor, layout), layout))
    return json.dumps({"shape": pixels.shape}).encode() + b"\n" + pixels.tobytes()


def _frames(kind: str | None, data: bytes, clip: Clip, processor: VideoProcessor, layout: Layout) -> Pixels:
    """The frames that are shown, [n, H, W, 3] of the layout's size; kind None: `data` is frames."""
    indices = processor.indices(clip)
    if kind is not None:
        return chosen_frames(data, kind, clip, indices, layout.size, processor.resample)
    width, height = clip.size
    frames = np.frombuffer(data, np.uint8).reshape(clip.num_frames, height, width, 3)
    return np.stack([resized(frames[index], layout.size, processor.resample) for index in indices])


@lru_cache(maxsize=8)
def _processor(family: str, settings: str) -> VideoProcessor:
    return VIDEO_PROCESSORS.load(family)(json.loads(settings))


if __name__ == "__main__":
    main()
