"""Videos of Qwen2-VL, 2.5-VL and 3-VL: two frames become one of patches. The newer ones say in words when each was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.fields.kinds import FLAG, Kind, number, whole
from app.media.processors.base import AREA, COUNT, SIDE, Layout, Pixels, Size, check_ratio, checked, side_of
from app.media.videos.clip import Clip
from app.media.videos.video_processor import VideoProcessor

RATE = number(0.01, 240)
FRAMES = whole(1, 4096)
USUAL_FPS, LEAST_FRAMES, MOST_FRAMES = 2, 4, 768


class Qwen2VLVideos(VideoProcessor):
    """Prepares as transformers' Qwen2VLVideoProcessor does, once it samples frames (`do_sample_frames`): two a second,
    as Qwen's own examples do. Every frame is resized for itself."""

    options: ClassVar[Mapping[str, Kind]] = {
        **{"fps": RATE, "num_frames": FRAMES, "min_frames": FRAMES, "max_frames": FRAMES},
        **{"min_pixels": AREA, "max_pixels": AREA},
    }
    refused: ClassVar[Mapping[str, bool]] = {"do_resize": False}
    least: ClassVar[int] = 128 * 28 * 28  # pixels where the files say nothing
    most: ClassVar[int] = 28 * 28 * 768
    patch: ClassVar[int] = 14
    most_tokens: ClassVar[int] = 128_000  # of `cap_pixels_per_frame`

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._patch, self._merge, self._pair = (
            int(settings[name]) for name in ("patch_size", "merge_size", "temporal_patch_size")
        )
        self._least, self._most = int(settings["min_pixels"]), int(settings["max_pixels"])
        self._cap = int(settings["max_video_tokens"]) * bool(settings["cap_pixels_per_frame"])

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        kinds = {**Qwen2VLVideos.options, "patch_size": SIDE, "merge_size": COUNT, "temporal_patch_size": whole(1, 16)}
        checked(
            own, {**kinds, "cap_pixels_per_frame": FLAG, "max_video_tokens": whole(1, 1 << 24)}, "the video processor"
        )
        vision = hf.get("vision_config") or {}
        size = own.get("size")
        return {
            "patch_size": int(own.get("patch_size") or vision.get("patch_size") or cls.patch),
            "merge_size": int(own.get("merge_size") or vision.get("spatial_merge_size") or 2),
            "temporal_patch_size": int(own.get("temporal_patch_size") or vision.get("temporal_patch_size") or 2),
            "min_pixels": int(own.get("min_pixels") or side_of(size, "shortest_edge", "min_pixels") or cls.least),
            "max_pixels": int(own.get("max_pixels") or side_of(size, "longest_edge", "max_pixels") or cls.most),
            "resample": int(own.get("resample", 3)),
            "fps": float(own.get("fps") or USUAL_FPS),
            "num_frames": int(own.get("num_frames") or 0),
            "min_frames": int(own.get("min_frames") or LEAST_FRAMES),
            "max_frames": int(own.get("max_frames") or MOST_FRAMES),
            "cap_pixels_per_frame": bool(own.get("cap_pixels_per_frame")),
            "max_video_tokens": int(own.get("max_video_tokens") or cls.most_tokens),
        }

    def indices(self, clip: Clip) -> Sequence[int]:
        """See VideoProcessor."""
        if clip.is_chosen:
            return range(clip.num_frames)
        return self._sampled(clip)

    def _sampled(self, clip: Clip) -> Sequence[int]:
        total, pair = clip.num_frames, self._pair
        count = round(self.settings["num_frames"] / pair) * pair
        if not self.settings["num_frames"]:
            most = min(self.settings["max_frames"], total) // pair * pair
            wanted = total / clip.fps * self.settings["fps"]
            count = math.floor(min(max(wanted, self.settings["min_frames"]), most, total) / pair) * pair
        count = min(max(1, count), total)
        return [int(np.float32(i * (total / count))) for i in range(count)]

    def layout(self, clip: Clip) -> Layout:
        """See VideoProcessor."""
        num_frames = len(self.indices(clip))
        wide, high = self._resized(clip.size, num_frames)
        grid = -(-num_frames // self._pair), high // self._patch, wide // self._patch
        seconds = self._pair * clip.num_frames / num_frames / clip.fps
        return Layout((wide, high), grid, self._runs(clip, grid), seconds)

    def _runs(self, clip: Clip, grid: tuple[int, int, int]) -> tuple[tuple[str, int], ...]:
        return ((self.placeholder, math.prod(grid) // self._merge**2),)

    def _resized(self, size: Size, num_frames: int) -> Size:
        most = self._most
        if self._cap:
            whole_video = int(self._cap * self._group**2 * 0.9)
            most = max(min(most, whole_video * self._pair // num_frames), int(self._least * 1.05))
        return self._fitted(size, 1, 1, most)

    @property
    def _group(self) -> int:
        return self._patch * self._merge

    def _fitted(self, size: Size, num_frames: int, whole_frames: int, most: int) -> Size:
        """A size of whole groups of patches, within the bounds of pixels of so many frames."""
        check_ratio(size)
        group, pixels = self._group, num_frames * size[0] * size[1]
        wide, high = (round(side / group) * group for side in size)
        if whole_frames * wide * high > most:
            shrink = math.sqrt(pixels / most)
            wide, high = (max(group, math.floor(side / shrink / group) * group) for side in size)
        elif whole_frames * wide * high < self._least:
            grow = math.sqrt(self._least / pixels)
            wide, high = (math.ceil(side * grow / group) * group for side in size)
        return wide, high

    def pixels(self, frames: Pixels, layout: Layout) -> Pixels:
        """[n, H, W, 3] -> [patches, 3, frames of a patch, patch, patch]; patches of one token follow each other, and
        the last frame is repeated where one is missing."""
        times, rows, columns = layout.grid
        patch, merge, pair = self._patch, self._merge, self._pair
        if missing := times * pair - len(frames):
            frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
        shape = (times, pair, rows // merge, merge, patch, columns // merge, merge, patch, 3)
        cut = frames.reshape(shape).transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return cut.reshape(times * rows * columns, 3, pair, patch, patch)


class BoundedVideos(Qwen2VLVideos):
    """Bounds of pixels are of all frames together."""

    def _resized(self, size: Size, num_frames: int) -> Size:
        if min(size) < self._group:
            scale = max(self._group / size[1], self._group / size[0])
            size = int(size[0] * scale), int(size[1] * scale)
        most = self._most
        if self._cap:
            share = min(self._cap * self._group**2, most // num_frames)
            most = num_frames * max(share, int(self._least * 1.05))
        count = max(num_frames, self._pair)
        return self._fitted(size, count, round(count / self._pair) * self._pair, most)


class Qwen3VLVideos(BoundedVideos):
    """Prepares as transformers' Qwen3VLVideoProcessor does.

    Around the tokens of each pair of frames stand the marks that a template writes around all of a video, and before
    them the second of the pair's middle.
    """

    options: ClassVar[Mapping[str, Kind]] = {
        name: kind for name, kind in Qwen2VLVideos.options.items() if not name.endswith("_pixels")
    }
    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {
        "begin": ("vision_start_token_id", 151_652),
        "end": ("vision_end_token_id", 151_653),
    }
    least: ClassVar[int] = 128 * 32 * 32
    most: ClassVar[int] = 32 * 32 * 768
    patch: ClassVar[int] = 16
    most_tokens: ClassVar[int] = 768

    @property
    def around_pad(self) -> tuple[str, str]:
        """See VideoProcessor."""
        return self.settings["begin"], self.settings["end"]

    def _sampled(self, clip: Clip) -> Sequence[int]:
        total, count = clip.num_frames, self.settings["num_frames"]
        if not count:
            wanted = int(total / clip.fps * self.settings["fps"])
            count = min(max(wanted, self.settings["min_frames"]), self.settings["max_frames"], total)
        return [int(place) for place in np.linspace(0, total - 1, count).round()]

    def _runs(self, clip: Clip, grid: tuple[int, int, int]) -> tuple[tuple[str, int], ...]:
        each = grid[1] * grid[2] // self._merge**2
        begin, end = self.around_pad
        runs: list[tuple[str, int]] = []
        for second in self._seconds(clip):
            runs += [(f"<{second:.1f} seconds>", 1), (begin, 1), (self.placeholder, each), (end, 1)]
        return tuple(runs)

    def _seconds(self, clip: Clip) -> list[float]:
        """The middle of each pair of frames."""
        shown, pair = list(self.indices(clip)), self._pair
        shown += [shown[-1]] * (-len(shown) % pair)
        times = [index / clip.fps for index in shown]
        return [(times[i] + times[i + pair - 1]) / 2 for i in range(0, len(times), pair)]
