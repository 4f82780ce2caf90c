"""Pictures of Idefics 3 and SmolVLM: tiles of one size, named by row and column, and the whole once more in one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.fields.kinds import FLAG, Kind
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
    side_of,
    tiles_of,
)

MAX_SIDE = 4096
FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"


class Idefics3Processor(Processor):
    """Prepares as transformers' Idefics3ImageProcessor and SmolVLMImageProcessor do."""

    options: ClassVar[Mapping[str, Kind]] = {"longest_edge": SIDE}

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        checked(own, {"do_image_splitting": FLAG, "image_seq_len": COUNT})
        vision = hf.get("vision_config") or {}
        built, patch = int(vision.get("image_size") or 224), int(vision.get("patch_size") or 32)
        side = side_of(own.get("max_image_size"), "longest_edge") or built
        seen = (side // patch) ** 2 // int(hf.get("scale_factor") or 2) ** 2
        num_tokens = int(own.get("image_seq_len") or seen)
        if vision:
            agree("the side of tiles", side, "vision_config.image_size", built)
            agree("image_seq_len", num_tokens, "what the encoder makes of a tile", seen)
        return {
            "longest_edge": side_of(own.get("size"), "longest_edge") or 4 * side,
            "side": side,
            "splits": int(own.get("do_image_splitting", True)),
            "patch_size": patch,
            "num_tokens": num_tokens,
            "resample": int(own.get("resample", 1)),
        }

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        side, seen = self.settings["side"], (self.placeholder, self.settings["num_tokens"])
        columns, rows = self._tiles(self._first(size))
        count = self.settings["patch_size"]
        whole_picture = ((FAKE, 1), (GLOBAL, 1), seen, (FAKE, 1))
        if columns * rows == 1:
            return Layout((side, side), (1, side // count, side // count), whole_picture)
        runs: list[tuple[str, int]] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                runs += [(FAKE, 1), (f"<row_{row}_col_{column}>", 1), seen]
            runs.append(("\n" if row < rows else "\n\n", 1))
        grid = rows * columns + 1, side // count, side // count
        return Layout((columns * side, rows * side), grid, (*runs, *whole_picture))

    def _first(self, size: Size) -> Size:
        """The size whose longer side is the settings', and the shorter even."""
        width, height = size
        long = self.settings["longest_edge"]
        ratio = width / height
        if width >= height:
            width, height = long, _even(int(long / ratio))
        else:
            width, height = _even(int(long * ratio)), long
        if max(width, height) > MAX_SIDE:
            ratio = width / height
            width, height = (MAX_SIDE, int(MAX_SIDE / ratio)) if width >= height else (int(MAX_SIDE * ratio), MAX_SIDE)
        return max(width, 1), max(height, 1)

    def _tiles(self, size: Size) -> Size:
        """Columns and rows of tiles, which cover a picture of this size once it is stretched to them."""
        if not self.settings["splits"]:
            return 1, 1
        side, (width, height) = self.settings["side"], size
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / side)
            return columns, math.ceil(int(columns * side / ratio) / side) or 1
        rows = math.ceil(height / side)
        return math.ceil(int(rows * side * ratio) / side) or 1, rows

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [tiles, 3, side, side], the whole last."""
        side, resample = self.settings["side"], self.settings["resample"]
        first = resized(image, self._first((image.shape[1], image.shape[0])), resample)
        stretched = resized(first, layout.size, resample)
        tiles = tiles_of(stretched, side)
        if len(tiles) == 1:
            return tiles
        return np.concatenate([tiles, tiles_of(resized(stretched, (side, side), resample), side)])

    def low(self) -> dict[str, Any]:
        """See Processor."""
        return {**self.settings, "splits": 0}


def _even(side: int) -> int:
    return max(1, side + side % 2)
