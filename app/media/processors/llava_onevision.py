"""Pictures of LLaVA-OneVision: all of it in one tile, then tiles of a larger copy that keeps the shape, on black."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from app.checkpoints.fields.kinds import TEXT, expect, several, whole
from app.errors import CheckpointError, UnsupportedError
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
    side_of,
    tiles_of,
)

MOST_SHAPES, MOST_TILES = 256, 64
DEFAULT_SIDE, DEFAULT_TILES = 384, 6  # the shapes that transformers takes where a checkpoint names none
_ASPECT = re.compile(r"^anyres_max_(\d{1,3})$")
Grid = tuple[int, int, int]


def most_tiles(aspect: str) -> int:
    """The number of tiles whose patches a picture may keep, as `vision_aspect_ratio` says it."""
    found = _ASPECT.match(aspect)
    if found is None or not int(found[1]):
        raise UnsupportedError(f"vision_aspect_ratio {aspect!r}; anyres_max_N is supported", param="model")
    return int(found[1])


def sides_of(*files: Mapping[str, Any], usual: Any = None) -> Any:
    """Returns `image_grid_pinpoints` of the first of a checkpoint's files that names them; the usual ones otherwise."""
    told = (file.get("image_grid_pinpoints") for file in files)
    return next((sides for sides in told if sides is not None), usual)


def shapes_of(given: Any, side: int) -> list[Size]:
    """Rows and columns of tiles that a picture may have, from `image_grid_pinpoints`: heights and widths in pixels."""
    if given is None:
        several_sides = [side * count for count in range(1, DEFAULT_TILES + 1)]
        given = [[height, width] for height in several_sides for width in several_sides]
    if not isinstance(given, list) or not 0 < len(given) <= MOST_SHAPES:
        raise CheckpointError(f"image_grid_pinpoints is no list of 1 to {MOST_SHAPES} sizes", param="model")
    for pair in given:
        expect(pair, several(whole(side, 1 << 14), 2, 2), "image_grid_pinpoints")
    shapes = [(int(height) // side, int(width) // side) for height, width in given]
    if (most := max(rows * columns for rows, columns in shapes)) > MOST_TILES:
        raise CheckpointError(f"image_grid_pinpoints hold {most} tiles of {side}; at most {MOST_TILES}", param="model")
    return shapes


def kept_patches(grid: Grid, side: int, most: int) -> tuple[int, int]:
    """Rows and columns of patches that are left once a picture of too many is shrunk. `side`: patches of a tile's."""
    _, rows, columns = grid
    shrink = math.sqrt(rows * columns / (most * side**2))
    return (rows, columns) if shrink <= 1.1 else (max(1, int(rows // shrink)), max(1, int(columns // shrink)))


def num_tokens(grid: Grid, side: int, most: int) -> int:
    """Tokens of a picture: the tile of all of it, and each row with one behind it."""
    if not grid[1]:
        return of_video(grid[0], side)[1]
    rows, columns = kept_patches(grid, side, most)
    return side**2 + rows * (columns + 1)


class LlavaOnevisionProcessor(Processor):
    """Prepares as transformers' LlavaOnevisionImageProcessor does each picture of a prompt that has one."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        checked(own, {"num_image_tokens": COUNT, "vision_aspect_ratio": TEXT, "patch_size": SIDE})
        vision = hf.get("vision_config") or {}
        side = side_of(own.get("size"), "height", "shortest_edge") or int(vision.get("image_size") or DEFAULT_SIDE)
        aspect = own.get("vision_aspect_ratio") or hf.get("vision_aspect_ratio") or "anyres_max_9"
        return {
            "side": side,
            "patches": side // int(vision.get("patch_size") or 14),
            "shapes": shapes_of(sides_of(own, hf), side),
            "most": most_tiles(str(aspect)),
            "resample": int(own.get("resample", 3)),
        }

    def layout(self, size: Size) -> Layout:
        """See Processor. The grid: rows of tiles, and rows and columns of patches that show something."""
        check_ratio(size)
        side, patches, most = (self.settings[name] for name in ("side", "patches", "most"))
        high, wide = self._shape(size)
        rows, columns = _shown(size, high * patches, wide * patches)
        grid = high, rows, columns
        return Layout((wide * side, high * side), grid, ((self.placeholder, num_tokens(grid, patches, most)),))

    def _shape(self, size: Size) -> Size:
        """Rows and columns of tiles: those that show most of a picture, and of these the fewest."""
        width, height = size
        best, found = (0, 0), (1, 1)
        for rows, columns in self.settings["shapes"]:
            high, wide = rows * self.settings["side"], columns * self.settings["side"]
            scale = min(wide / width, high / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            rank = shown, shown - wide * high
            if rank > best:
                best, found = rank, (rows, columns)
        return found

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [1 + tiles, 3, side, side], all of it first."""
        side, resample = self.settings["side"], self.settings["resample"]
        wide, high = layout.size
        height, width = image.shape[:2]
        across, down = wide / width, high / height
        if across < down:
            size = wide, min(math.ceil(height * across), high)
        else:
            size = min(math.ceil(width * down), wide), high
        canvas = np.zeros((high, wide, 3), np.uint8)
        left, top = (wide - size[0]) // 2, (high - size[1]) // 2
        canvas[top : top + size[1], left : left + size[0]] = resized(image, size, resample)
        whole_picture = resized(image, (side, side), resample)
        return np.concatenate([tiles_of(whole_picture, side), tiles_of(canvas, side)])

    def low(self) -> dict[str, Any]:
        """See Processor."""
        return {**self.settings, "shapes": [(1, 1)]}


def _shown(size: Size, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of so many patches that a picture within them covers; what lies beside it is as wide on both
    sides."""
    width, height = size
    if width / height > columns / rows:
        covered = int(round(height * (columns / width), 7))
        return rows - (rows - covered) // 2 * 2, columns
    covered = int(round(width * (rows / height), 7))
    return rows, columns - (columns - covered) // 2 * 2


def of_video(num_frames: int, patches: int) -> tuple[tuple[int, int, int], int]:
    """The grid of a video, which has no patches of a whole, and its tokens: half as many as patches along each side of
    a frame, and one behind them all."""
    return (num_frames, 0, 0), num_frames * (-(-patches // 2)) ** 2 + 1
