"""Pictures of Pixtral and Mistral 3: of any shape within a square, row by row, each row behind a token of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from app.checkpoints.fields.kinds import TEXT, Kind
from app.media.processors.base import (
    LOW_SIDE,
    SIDE,
    Layout,
    Pixels,
    Processor,
    Size,
    channels_first,
    checked,
    resized,
    side_of,
)


class PixtralProcessor(Processor):
    """Prepares as transformers' PixtralImageProcessor does, in groups of patches that become one token."""

    options: ClassVar[Mapping[str, Kind]] = {"longest_edge": SIDE}

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        checked(own, {"image_break_token": TEXT, "image_end_token": TEXT})
        vision = hf.get("vision_config") or {}
        return {
            "longest_edge": side_of(own.get("size"), "longest_edge", "height") or int(vision.get("image_size") or 1024),
            "patch_size": int(vision.get("patch_size") or 16),
            "merge_size": int(hf.get("spatial_merge_size") or 1),
            "break": own.get("image_break_token", "[IMG_BREAK]"),
            "end": own.get("image_end_token", "[IMG_END]"),
            "resample": int(own.get("resample", 3)),
        }

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        patch, merge = self.settings["patch_size"], self.settings["merge_size"]
        shrink = max(1.0, max(size) / self.settings["longest_edge"])
        sides = (side if shrink == 1 else math.floor(side / shrink) for side in size)
        columns, rows = (max(1, -(-side // (patch * merge))) for side in sides)
        row = (self.placeholder, columns)
        runs = (*((row, (self.settings["break"], 1)) * (rows - 1)), row, (self.settings["end"], 1))
        wide, high = columns * merge, rows * merge
        return Layout((wide * patch, high * patch), (1, high, wide), runs)

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [1, 3, height, width]."""
        return channels_first(resized(image, layout.size, self.settings["resample"]))[None]

    def low(self) -> dict[str, Any]:
        """See Processor."""
        return {**self.settings, "longest_edge": min(LOW_SIDE, self.settings["longest_edge"])}
