"""Pictures of Command A Vision: as few tiles as show them without shrinking them, and all of it once more in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.fields.kinds import whole
from app.media.processors.aya_vision import BEGIN, END, ratio_of
from app.media.processors.base import Layout, Size, checked
from app.media.processors.internvl import InternVLProcessor

LINE_BREAK = "<|IMG_LINE_BREAK|>"  # behind each tile
USUAL = {"image_size": 224, "patch_size": 16}  # SigLIP's, where config.json leaves them out


class Cohere2VisionProcessor(InternVLProcessor):
    """Prepares as transformers' Cohere2VisionProcessor does; Pillow's resampling stands for torchvision's."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor; `patch_size` of the processor's file is the side of a tile in tokens."""
        checked(own, {"patch_size": whole(1, 256)})
        told = {} if own.get("patch_size") is None else {"image_seq_length": own["patch_size"] ** 2}
        vision = {**USUAL, **(hf.get("vision_config") or {})}
        return super().settings_of({**own, **told}, {**hf, "downsample_ratio": ratio_of(hf), "vision_config": vision})

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        plain = super().layout(size)
        tile = ((self.placeholder, self.settings["num_tokens"]), (LINE_BREAK, 1))
        return Layout(plain.size, plain.grid, ((BEGIN, 1), *tile * plain.grid[0], (END, 1)))

    def _tiles(self, size: Size) -> Size:
        """Columns and rows of the tiles for which the picture grows least, else shrinks least; of these the fewest."""
        side, most = self.settings["side"], self.settings["max_patches"]
        grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
        grids.sort(key=lambda grid: grid[0] * grid[1])

        def scale(grid: Size) -> float:
            return float(min(grid[0] * side / size[0], grid[1] * side / size[1]))

        growing = [grid for grid in grids if scale(grid) >= 1]
        return min(growing, key=scale) if growing else max(grids, key=scale)
