"""Reads videos: a file in, pixels of chosen frames and identity out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from app.config.media import MediaConfig
from app.errors import InvalidRequestError
from app.media.picture import Picture, digest_of
from app.media.processes import ProcessPool
from app.media.processors.base import Layout
from app.media.videos.clip import Clip, RawVideo
from app.media.videos.kinds import kind_of
from app.media.videos.video_processor import VideoProcessor

MODULE = "app.media.videos.video_process"
PIXELS_PER_S = 1 << 25  # of frames that are decoded, for each of which a second is granted
# Counting the packets of a file takes 20 to 44 us each, as measured; a packet takes so many bytes with its index, and
# beside those of the pictures there may be as many of a sound.
PACKET_S, PACKET_BYTES = 5e-5, 64


class VideoReader:
    """All videos of one process go through one. `key` is the cluster's secret: identities are the same everywhere.

    May be called from any thread; calls block on a process. Messages of errors go on behind the name of a field.
    """

    def __init__(self, config: MediaConfig, key: bytes) -> None:
        self.config = config
        self._key = key
        self._processes = ProcessPool(MODULE, config.max_decoders, config.decode_memory_bytes)

    def probe(self, data: bytes) -> Clip:
        """Says of a file what it holds, once it is known to be within the limits: no frame but the first is decoded.
        InvalidRequestError says what is wrong with it, UnsupportedError that it is of a kind that is not read,
        OverloadedError that nobody could look."""
        config = self.config
        bounds = {
            **{"max_s": config.max_video_s, "max_frames": config.max_video_frames},
            **{"max_pixels": config.max_image_pixels, "max_side": config.max_image_side},
        }
        num_packets = min(len(data) // PACKET_BYTES, 2 * config.max_video_frames)
        timeout_s = config.decode_timeout_s + num_packets * PACKET_S
        said, _ = self._processes.ask({"do": "probe", "kind": kind_of(data), "bounds": bounds}, data, timeout_s)
        return Clip.of_json(said)

    def read(
        self, video: bytes | RawVideo, family: str, processor: VideoProcessor, most_tokens: int, asked: Sequence[bytes]
    ) -> Picture:
        """A video, of at most so many tokens, as a processor prepares it; `asked`: all beside its pixels that is its
        identity. Errors as those of `probe`."""
        data, clip, kind = video, None, None
        if isinstance(video, RawVideo):
            data, clip = video.frames, video.clip
        else:
            clip, kind = self.probe(video), kind_of(video)
        assert isinstance(data, bytes)
        layout = processor.layout(clip)
        decoded = 0 if kind is None else processor.indices(clip)[-1] + 1
        self._check(clip, layout, len(processor.indices(clip)), decoded, most_tokens)
        job = {"do": "show", "kind": kind, "clip": clip.as_json(), "family": family, "settings": processor.settings}
        num_pixels = decoded * math.prod(clip.size)
        timeout_s = self.config.decode_timeout_s + num_pixels / PIXELS_PER_S
        answer, shown = self._processes.ask(job, data, timeout_s)
        pixels, shape = bytes(shown), tuple(answer["shape"])
        said = json.dumps([layout.grid, layout.runs, layout.seconds_per_frame, shape]).encode()
        return Picture(digest_of(self._key, [b"video", *asked, said, pixels]), layout, shape, pixels, "video")

    def _check(self, clip: Clip, layout: Layout, num_shown: int, num_decoded: int, most_tokens: int) -> None:
        """Refuse what would be too much before it is decoded."""
        config = self.config
        most, num_pixels = config.max_video_pixels, num_decoded * math.prod(clip.size)
        size = f"{clip.size[0]} x {clip.size[1]} pixels"
        if num_pixels > most:
            raise InvalidRequestError(f"has {num_decoded} frames of {size}; at most {most} pixels in all are decoded")
        what = f"has {num_shown} frames that are shown, of {layout.size[0]} x {layout.size[1]} pixels"
        if layout.num_tokens > most_tokens:
            much = f"{layout.num_tokens} tokens; at most {most_tokens} fit"
            raise InvalidRequestError(f"{what}, which are {much}: send a shorter or smaller one")
        num_bytes = 3 * num_shown * math.prod(layout.size)
        if num_bytes > config.max_prompt_bytes:
            raise InvalidRequestError(f"{what}, {num_bytes} bytes; a prompt may have {config.max_prompt_bytes}")

    def close(self) -> None:
        """End the processes; idempotent."""
        self._processes.close()
