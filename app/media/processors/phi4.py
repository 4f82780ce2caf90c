"""Pictures of Phi-4-multimodal: tiles of one size, on white where the shape leaves room; the encoder makes one more of
all of it, and drops patches that show nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.fields.kinds import Kind, whole
from app.errors import InvalidRequestError
from app.media.processors.base import SIDE, Layout, Pixels, Processor, Size, agree, checked, resized, side_of, tiles_of

LEAST_SIDE = 10  # of a picture once it is resized


class Phi4Processor(Processor):
    """Prepares as transformers' Phi4MultimodalImageProcessor does; Pillow's resampling stands for torchvision's."""

    options: ClassVar[Mapping[str, Kind]] = {"dynamic_hd": whole(1, 64)}

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        checked(own, {"patch_size": SIDE, **cls.options})
        vision = hf.get("vision_config") or {}
        side = side_of(own.get("size"), "height") or int(vision.get("crop_size") or 448)
        patch = int(own.get("patch_size") or vision.get("patch_size") or 14)
        agree("the side of tiles", side, "vision_config.crop_size", vision.get("crop_size"))
        agree("patch_size", patch, "vision_config.patch_size", vision.get("patch_size"))
        return {"side": side, "patch_size": patch, "dynamic_hd": int(own.get("dynamic_hd") or 36)}

    def layout(self, size: Size) -> Layout:
        """See Processor: the grid holds rows of tiles, and rows and columns of patches that show something."""
        side, patch = self.settings["side"], self.settings["patch_size"]
        wide, high = self._tiles(size)
        width, height = self._resized(size, (wide * side, high * side))
        if min(width, height) < LEAST_SIDE:
            raise InvalidRequestError(f"has {size[0]} x {size[1]} pixels, which are {width} x {height} in its tiles")
        rows, columns = (
            whole_side // patch - (whole_side - shown) // patch
            for whole_side, shown in ((high * side, height), (wide * side, width))
        )
        grid = high, rows, columns
        return Layout((wide * side, high * side), grid, ((self.placeholder, num_tokens(grid, side // patch)),))

    def _tiles(self, size: Size) -> Size:
        """Says how many tiles stand side by side, and one above the other: as many as the picture fills, or where those
        are too many, as many as have the nearest shape."""
        side, most = self.settings["side"], self.settings["dynamic_hd"]
        filled = math.ceil(size[0] / side), math.ceil(size[1] / side)
        if math.prod(filled) <= most:
            return filled
        # In the order of sets of pairs, which decides between shapes of one size: so does transformers.
        shapes = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= most}
        best, least = (1, 1), math.inf
        for shape in sorted(shapes, key=math.prod):
            apart = abs(size[0] / size[1] - shape[0] / shape[1])
            if apart < least or (apart == least and math.prod(size) > 0.5 * side * side * math.prod(shape)):
                best, least = shape, apart
        return best

    @staticmethod
    def _resized(size: Size, canvas: Size) -> Size:
        across, down = canvas[0] / size[0], canvas[1] / size[1]
        return (canvas[0], int(size[1] * across)) if across < down else (int(size[0] * down), canvas[1])

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [tiles, 3, side, side]."""
        wide, high = layout.size
        canvas = np.full((high, wide, 3), 255, np.uint8)
        width, height = self._resized((image.shape[1], image.shape[0]), layout.size)
        canvas[:height, :width] = resized(image, (width, height), 2)
        return tiles_of(canvas, self.settings["side"])

    def low(self) -> dict[str, Any]:
        """See Processor."""
        return {**self.settings, "dynamic_hd": 1}


def num_tokens(grid: tuple[int, int, int], patches: int) -> int:
    """Tokens of a picture whose tiles have so many patches along a side: one of four, and one behind each row; those of
    the whole in one tile, and one between."""
    rows, columns, side = -(-grid[1] // 2), -(-grid[2] // 2), patches // 2
    return rows * (columns + 1) + 1 + side * (side + 1)
