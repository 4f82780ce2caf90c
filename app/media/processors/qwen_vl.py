"""Pictures of Qwen2-VL, 2.5-VL, 3-VL: both sides are whole groups of patches, each of which becomes one token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from app.checkpoints.fields.kinds import Kind
from app.media.processors.base import (
    AREA,
    COUNT,
    LOW_SIDE,
    SIDE,
    Layout,
    Pixels,
    Processor,
    Size,
    check_ratio,
    checked,
    resized,
    side_of,
)


class QwenVLProcessor(Processor):
    """Prepares as transformers' Qwen2VLImageProcessor does, which all of them share."""

    options: ClassVar[Mapping[str, Kind]] = {"min_pixels": AREA, "max_pixels": AREA}
    least: ClassVar[int] = 56 * 56  # pixels where the files say nothing
    most: ClassVar[int] = 28 * 28 * 1280
    frames: ClassVar[int] = 1  # that pixels are counted in

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._patch, self._merge = settings["patch_size"], settings["merge_size"]
        self._least, self._most = settings["min_pixels"], settings["max_pixels"]

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        checked(own, {"patch_size": SIDE, "merge_size": COUNT, **cls.options})
        vision = hf.get("vision_config") or {}
        size = own.get("size")
        return {
            "patch_size": int(own.get("patch_size") or vision.get("patch_size") or 14),
            "merge_size": int(own.get("merge_size") or vision.get("spatial_merge_size") or 2),
            "min_pixels": int(own.get("min_pixels") or side_of(size, "shortest_edge", "min_pixels") or cls.least),
            "max_pixels": int(own.get("max_pixels") or side_of(size, "longest_edge", "max_pixels") or cls.most),
            "resample": int(own.get("resample", 3)),
        }

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        group = self._patch * self._merge
        size = self.enlarged(size, group)
        check_ratio(size)
        pixels = self.frames * size[0] * size[1]
        wide, high = (self._whole(side, group) for side in size)
        if self.frames * wide * high > self._most:
            shrink = math.sqrt(pixels / self._most)
            wide, high = (max(group, math.floor(side / shrink / group) * group) for side in size)
        elif self.frames * wide * high < self._least:
            grow = math.sqrt(self._least / pixels)
            wide, high = (math.ceil(side * grow / group) * group for side in size)
        grid = 1, high // self._patch, wide // self._patch
        return Layout((wide, high), grid, ((self.placeholder, math.prod(grid) // self._merge**2),))

    def enlarged(self, size: Size, group: int) -> Size:
        """The size that is resized from; `group`: pixels along a side of a token."""
        return size

    @staticmethod
    def _whole(side: int, group: int) -> int:
        return round(side / group) * group

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [patches, 3, patch, patch]; patches of one token follow each other."""
        image = resized(image, layout.size, self.settings["resample"])
        return grouped_patches(image, self._patch, self._merge)

    def low(self) -> dict[str, Any]:
        """See Processor."""
        most = min(self._most, LOW_SIDE**2)
        return {**self.settings, "max_pixels": most, "min_pixels": min(self._least, most)}


def grouped_patches(image: Pixels, patch: int, merge: int) -> Pixels:
    """[H, W, 3] of whole groups -> [patches, 3, patch, patch]; those of one token follow each other."""
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    cut = image.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, patch, patch)
