"""Pictures of Llama 4: tiles of one size, on black where the shape leaves room, and all of it once more in one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.fields.kinds import FLAG, TEXT, Kind, number, whole
from app.media.processors.base import (
    SIDE,
    Layout,
    Pixels,
    Processor,
    Size,
    checked,
    resized,
    side_of,
    tiles_of,
)

MAX_TILES = whole(1, 64)
MARKS = {
    "begin": ("start_of_image_token", "<|image_start|>"),
    "end": ("end_of_image_token", "<|image_end|>"),
    "written": ("image_token", "<|image|>"),
    "across": ("tile_x_separator_token", "<|tile_x_separator|>"),
    "down": ("tile_y_separator_token", "<|tile_y_separator|>"),
}


class Llama4Processor(Processor):
    """Prepares as transformers' Llama4ImageProcessor does; Pillow's resampling stands for torchvision's."""

    options: ClassVar[Mapping[str, Kind]] = {"max_patches": MAX_TILES, "resize_to_max_canvas": FLAG}

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        ratio_of = {"pixel_shuffle_ratio": number(above=0.06, most=1)}
        checked(
            own, {**cls.options, **ratio_of, "patch_size": SIDE, **dict.fromkeys((n for n, _ in MARKS.values()), TEXT)}
        )
        vision = hf.get("vision_config") or {}
        side = side_of(own.get("size"), "height", "shortest_edge") or int(vision.get("image_size") or 336)
        patch = int(own.get("patch_size") or vision.get("patch_size") or 14)
        ratio = float(own.get("pixel_shuffle_ratio") or vision.get("pixel_shuffle_ratio") or 0.5)
        return {
            "side": side,
            "patch_size": patch,
            "num_tokens": (side // patch) ** 2 // round(1 / ratio**2),
            "max_patches": int(own.get("max_patches") or 16),
            "resize_to_max_canvas": bool(own.get("resize_to_max_canvas", False)),
            "resample": int(own.get("resample", 2)),
            **{name: own.get(field, text) for name, (field, text) in MARKS.items()},
        }

    @property
    def written(self) -> str:
        """See Processor."""
        return str(self.settings["written"])

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        side, (rows, columns) = self.settings["side"], self._tiles(size)
        seen = (self.placeholder, self.settings["num_tokens"])
        row = (*(seen, (self.settings["across"], 1)) * (columns - 1), seen, (self.settings["down"], 1))
        tiles = rows * columns
        runs = ((self.settings["begin"], 1), *(row * rows if tiles > 1 else ()), (self.written, 1), seen)
        patches = side // self.settings["patch_size"]
        grid = tiles + (tiles > 1), patches, patches
        return Layout((columns * side, rows * side), grid, (*runs, (self.settings["end"], 1)))

    def _tiles(self, size: Size) -> Size:
        """Rows and columns: those that enlarge a picture least, else shrink it least; of these the fewest."""
        side, most = self.settings["side"], self.settings["max_patches"]
        width, height = size
        shapes = [(i, j) for i in range(1, most + 1) for j in range(1, most // i + 1)]
        scales = {shape: np.float32(min(shape[1] * side / width, shape[0] * side / height)) for shape in shapes}
        enlarging = [scale for scale in scales.values() if scale >= 1]
        if enlarging:
            chosen = max(enlarging) if self.settings["resize_to_max_canvas"] else min(enlarging)
        else:
            chosen = max(scales.values())
        fitting = [shape for shape in self._in_order(most) if scales[shape] == chosen]
        return min(fitting, key=lambda shape: shape[0] * shape[1])

    @staticmethod
    def _in_order(most: int) -> list[Size]:
        """All shapes of at most so many tiles by their ratios, in the order in which larger counts bring them."""
        ratios: dict[float, list[Size]] = {}
        for tiles in range(most, 0, -1):
            for rows in (count for count in range(1, tiles + 1) if tiles % count == 0):
                ratios.setdefault(rows / (tiles // rows), []).append((rows, tiles // rows))
        return [shape for shapes in ratios.values() for shape in shapes]

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [tiles, 3, side, side], all of it last."""
        side, resample = self.settings["side"], self.settings["resample"]
        (width, height), (wide, high) = image.shape[1::-1], layout.size
        bound_wide, bound_high = wide, high
        if not self.settings["resize_to_max_canvas"]:
            bound_wide, bound_high = min(max(width, side), wide), min(max(height, side), high)
        across, down = bound_wide / width, bound_high / height
        if across < down:
            size = bound_wide, min(math.floor(height * across), bound_high)
        else:
            size = min(math.floor(width * down), bound_wide), bound_high
        size = max(size[0], 1), max(size[1], 1)
        canvas = np.zeros((high, wide, 3), np.uint8)
        canvas[: size[1], : size[0]] = resized(image, size, resample)
        tiles = tiles_of(canvas, side)
        if len(tiles) == 1:
            return tiles
        return np.concatenate([tiles, tiles_of(resized(image, (side, side), resample), side)])

    def low(self) -> dict[str, Any]:
        """See Processor."""
        return {**self.settings, "max_patches": 1}
