"""Videos of GLM-4.1V, 4.5V and 4.6V: pairs of frames as pictures, behind each the second of its first frame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.fields.kinds import Kind, whole
from app.media.processors.base import checked
from app.media.videos.clip import Clip
from app.media.videos.qwen_vl import BoundedVideos

BEGIN, END = "<|begin_of_image|>", "<|end_of_image|>"
# 4.6V: pairs of frames a second, of videos up to so many seconds.
RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))
MOST_SHOWN = 640  # frames of a video of 4.6V


class Glm4vVideos(BoundedVideos):
    """Prepares as transformers' Glm4vVideoProcessor does, or Glm46VVideoProcessor where the files name that."""

    options: ClassVar[Mapping[str, Kind]] = {}
    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {"piece": ("image_token_id", 151_363)}
    least: ClassVar[int] = 112 * 112
    most: ClassVar[int] = 28 * 28 * 2 * 30_000

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        checked(own, {"max_duration": whole(1, 86_400)}, "the video processor")
        names = (str(own.get(name)) for name in ("video_processor_type", "processor_class"))
        return {
            **super().settings_of(own, hf),
            "cap_pixels_per_frame": False,
            "max_duration": int(own.get("max_duration") or 300),
            "is_newer": any(name.startswith("Glm46V") for name in names),
        }

    def _sampled(self, clip: Clip) -> Sequence[int]:
        places = self._by_length(clip) if self.settings["is_newer"] else self._by_rate(clip)
        shown = list(dict.fromkeys(min(place, clip.num_frames - 1) for place in places)) or [0]
        return shown + shown[-1:] * (len(shown) % 2)

    def _by_rate(self, clip: Clip) -> Sequence[int]:
        seconds, rate, most_s = clip.num_frames / clip.fps, self.settings["fps"], self.settings["max_duration"]
        if seconds <= most_s:
            return [math.ceil(i * clip.fps / rate) for i in range(max(int(seconds * rate), 1))]
        if int(most_s * rate) >= clip.num_frames:
            return range(clip.num_frames)
        return [math.ceil(second * clip.fps) for second in np.linspace(0, seconds, int(most_s * rate))]

    def _by_length(self, clip: Clip) -> Sequence[int]:
        total, seconds = clip.num_frames, clip.num_frames / clip.fps
        counted_s = min(seconds, RATES[-1][0])
        rate = self._pair * next(rate for most_s, rate in RATES if counted_s <= most_s)
        count = min(int(counted_s * rate), MOST_SHOWN)
        places = [] if total < count else _first_at(total, clip.fps, rate, int(seconds))
        if len(places) < count:
            first, last = (places[0], places[-1]) if places else (0, total - 1)
            return np.linspace(first, last, count, dtype=int).tolist()  # type: ignore[no-any-return]
        return places if len(places) == count else np.linspace(0, total - 1, count, dtype=int).tolist()

    def _runs(self, clip: Clip, grid: tuple[int, int, int]) -> tuple[tuple[str, int], ...]:
        piece = self.settings["piece"], grid[1] * grid[2] // self._merge**2
        runs: list[tuple[str, int]] = []
        for place in list(self.indices(clip))[:: self._pair]:
            second = place / clip.fps
            said = f"{second:.1f} seconds" if self.settings["is_newer"] else str(int(second))
            runs += [(BEGIN, 1), piece, (END, 1), (said, 1)]
        return tuple(runs)


def _first_at(total: int, fps: float, rate: float, end_s: int) -> list[int]:
    """The first frames at so many moments a second."""
    places, at = [], 0.0
    for place in range(total):
        if place * (1 / fps) >= at:
            places.append(place)
            at += 1 / rate
            if at >= end_s:
                break
    return places
