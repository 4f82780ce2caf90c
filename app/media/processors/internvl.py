"""Pictures of InternVL: tiles of one size, as many as fit the shape best, and all of it once more in one tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.fields.kinds import FLAG, TEXT, Kind, check, expect, number, whole
from app.media.processors.base import (
    COUNT,
    SIDE,
    Layout,
    Pixels,
    Processor,
    Size,
    agree,
    checked,
    resized,
    shaped_grid,
    side_of,
    tiles_of,
)

MAX_TILES = whole(1, 64)


class InternVLProcessor(Processor):
    """Prepares as transformers' GotOcr2ImageProcessor does, which crops to patches for InternVL."""

    options: ClassVar[Mapping[str, Kind]] = {"max_patches": MAX_TILES}

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        kinds = {"min_patches": MAX_TILES, "max_patches": MAX_TILES, "image_seq_length": COUNT}
        checked(own, {**kinds, "crop_to_patches": FLAG, "start_image_token": TEXT, "end_image_token": TEXT})
        vision = hf.get("vision_config") or {}
        side, patch = (_first(vision.get(name), default) for name, default in (("image_size", 448), ("patch_size", 14)))
        for name, value in (("image_size", side), ("patch_size", patch)):
            expect(value, SIDE, f"config.json is not usable: vision_config.{name}")
        check(hf, {"downsample_ratio": number(above=0, most=1)}, "config.json")
        seen = int((side // patch * float(hf.get("downsample_ratio") or 0.5)) ** 2)
        own_side = side_of(own.get("size"), "height", "shortest_edge") or side
        num_tokens = int(own.get("image_seq_length") or seen)
        if vision:
            agree("the side of tiles", own_side, "vision_config.image_size", side)
            agree("image_seq_length", num_tokens, "what the encoder makes of a tile", seen)
        return {
            "side": own_side,
            "patch_size": patch,
            "min_patches": int(own.get("min_patches", 1)),
            "max_patches": int(own.get("max_patches", 12)) if own.get("crop_to_patches", True) else 1,
            "num_tokens": num_tokens,
            "begin": own.get("start_image_token", "<img>"),
            "end": own.get("end_image_token", "</img>"),
            "has_whole": True,  # in a tile more, where there are several
            "resample": int(own.get("resample", 3)),
        }

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        side, (columns, rows) = self.settings["side"], self._tiles(size)
        tiles = columns * rows + (columns * rows > 1 and self.settings["has_whole"])
        grid = tiles, side // self.settings["patch_size"], side // self.settings["patch_size"]
        seen = (self.placeholder, tiles * self.settings["num_tokens"])
        return Layout(
            (columns * side, rows * side), grid, ((self.settings["begin"], 1), seen, (self.settings["end"], 1))
        )

    def _tiles(self, size: Size) -> Size:
        """Columns and rows whose shape is the picture's best."""
        return shaped_grid(size, *(self.settings[name] for name in ("min_patches", "max_patches", "side")))

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [tiles, 3, side, side], the whole last."""
        side, resample = self.settings["side"], self.settings["resample"]
        tiles = tiles_of(resized(image, layout.size, resample), side)
        if len(tiles) == 1 or not self.settings["has_whole"]:
            return tiles
        whole_picture = resized(image, (side, side), resample)
        return np.concatenate([tiles, tiles_of(whole_picture, side)])

    def low(self) -> dict[str, Any]:
        """See Processor."""
        return {**self.settings, "min_patches": 1, "max_patches": 1}


def _first(value: Any, default: int) -> int:
    return int((value[0] if isinstance(value, list) and value else value) or default)
