"""Pictures of LFM2-VL: small ones in a size near their own, large ones in tiles, and all of them once more in one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.fields.kinds import FLAG, Kind, number, whole
from app.errors import CheckpointError
from app.media.processors.base import (
    COUNT,
    SIDE,
    Layout,
    Pixels,
    Processor,
    Size,
    check_ratio,
    checked,
    resized,
    shaped_grid,
)
from app.media.processors.qwen_vl import grouped_patches

MAX_TILES = whole(1, 64)
FIELDS: Mapping[str, Kind] = {
    **{"encoder_patch_size": SIDE, "downsample_factor": whole(1, 16), "tile_size": SIDE},
    **{"min_tiles": MAX_TILES, "max_tiles": MAX_TILES, "min_image_tokens": COUNT, "max_image_tokens": COUNT},
    **dict.fromkeys(("do_image_splitting", "use_thumbnail", "use_image_special_tokens"), FLAG),
    "max_pixels_tolerance": number(above=0, most=1e6),
}
DEFAULTS: Mapping[str, Any] = {
    **{"encoder_patch_size": 16, "downsample_factor": 2, "tile_size": 512, "min_tiles": 2, "max_tiles": 10},
    **{"min_image_tokens": 64, "max_image_tokens": 256, "do_image_splitting": True, "use_thumbnail": True},
    **{"use_image_special_tokens": True, "max_pixels_tolerance": 2.0},
}


def tile_rows(own: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """Rows of patches of a tile, from the files of a checkpoint."""
    patch, factor, side = (_given(own, hf, name) for name in ("encoder_patch_size", "downsample_factor", "tile_size"))
    if side % (patch * factor):
        raise CheckpointError(
            f"the image processor: tiles of {side} are not made of squares of {patch * factor}", param="model"
        )
    return int(side // patch)


def _given(own: Mapping[str, Any], hf: Mapping[str, Any], name: str) -> Any:
    return own.get(name, hf.get(name, DEFAULTS[name]))


class Lfm2VlProcessor(Processor):
    """Prepares by the rules of transformers' Lfm2VlImageProcessor."""

    options: ClassVar[Mapping[str, Kind]] = {
        name: FIELDS[name]
        for name in ("min_tiles", "max_tiles", "min_image_tokens", "max_image_tokens", "do_image_splitting")
    }

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        told = {name: _given(own, hf, name) for name in FIELDS}
        checked(told, FIELDS)
        tile_rows(own, hf)
        return {**told, "resample": int(own.get("resample", 2))}

    def layout(self, size: Size) -> Layout:
        """See Processor. The grid: tiles, and rows and columns of patches of what is not cut, behind them."""
        check_ratio(size)
        s, (wide, high) = self.settings, self._whole(size)
        patch, square = s["encoder_patch_size"], s["encoder_patch_size"] * s["downsample_factor"]
        columns, rows = self._tiles(size)
        seen = self.placeholder, wide * high // square**2
        if columns * rows == 1:
            grid = 0, high // patch, wide // patch
            return Layout((wide, high), grid, self._marked([("<|image_start|>", 1), seen, _END]))
        runs = [("<|image_start|>", 1)]
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                mark = f"<|img_row_{row}_col_{column}|>"
                runs += [(mark, 1), (self.placeholder, (s["tile_size"] // square) ** 2)]
        has_whole = s["use_thumbnail"]
        runs += [("<|img_thumbnail|>", 1), seen] if has_whole else []
        grid = rows * columns, has_whole * high // patch, has_whole * wide // patch
        return Layout((columns * s["tile_size"], rows * s["tile_size"]), grid, self._marked([*runs, _END]))

    def _marked(self, runs: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
        """The runs of a picture, with the marks around and between its pieces or without them."""
        has_marks = self.settings["use_image_special_tokens"]
        return tuple(run for run in runs if has_marks or run[0] == self.placeholder)

    def _whole(self, size: Size) -> Size:
        """Width and height of a picture that is not cut: whole squares of patches, neither too few nor too many."""
        width, height = size
        square = self.settings["encoder_patch_size"] * self.settings["downsample_factor"]
        least, most = (self.settings[f"{which}_image_tokens"] * square**2 for which in ("min", "max"))
        wide, high = (max(square, round(side / square) * square) for side in size)
        if wide * high > most:
            shrink = math.sqrt(height * width / most)
            wide, high = (max(square, math.floor(side / shrink / square) * square) for side in size)
        elif wide * high < least:
            grow = math.sqrt(least / (height * width))
            wide, high = (math.ceil(side * grow / square) * square for side in size)
        return wide, high

    def _tiles(self, size: Size) -> Size:
        """Columns and rows of tiles; 1, 1 for a picture that is not cut."""
        s = self.settings
        patch, square = s["encoder_patch_size"], s["encoder_patch_size"] * s["downsample_factor"]
        wide, high = (max(patch, round(side / square) * square) for side in size)
        is_large = wide * high > s["max_image_tokens"] * square**2 * s["max_pixels_tolerance"]
        if not (is_large and s["do_image_splitting"]):
            return 1, 1
        return shaped_grid(size, s["min_tiles"], max(s["min_tiles"], s["max_tiles"]), s["tile_size"])

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [patches, 3, patch, patch], tile by tile; patches of one token follow each other."""
        side, resample = self.settings["tile_size"], self.settings["resample"]
        tiles, rows, columns = layout.grid
        parts = []
        if tiles:
            cut = resized(image, layout.size, resample)
            for top in range(0, layout.size[1], side):
                parts += [cut[top : top + side, left : left + side] for left in range(0, layout.size[0], side)]
        if rows:
            patch = self.settings["encoder_patch_size"]
            parts.append(resized(image, (columns * patch, rows * patch), resample))
        patch, factor = self.settings["encoder_patch_size"], self.settings["downsample_factor"]
        return np.concatenate([grouped_patches(part, patch, factor) for part in parts])

    def low(self) -> dict[str, Any]:
        """See Processor."""
        return {**self.settings, "do_image_splitting": False}


_END = ("<|image_end|>", 1)
