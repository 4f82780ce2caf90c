"""Pictures of Gemma 4: as large as so many tokens allow in their own shape, between texts that stand around each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from app.checkpoints.fields.kinds import Kind, whole
from app.media.processors.base import (
    SIDE,
    Layout,
    Pixels,
    Processor,
    Size,
    channels_first,
    checked,
    resized,
)

MOST_TOKENS = whole(1, 1120)
LOW_TOKENS = 70  # the fewest that the model was trained with


class Gemma4Processor(Processor):
    """Prepares as transformers' Gemma4ImageProcessor does."""

    options: ClassVar[Mapping[str, Kind]] = {"max_soft_tokens": MOST_TOKENS}
    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {
        "begin": ("boi_token_id", 255_999),
        "end": ("eoi_token_id", 258_882),
    }

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        checked(own, {"patch_size": SIDE, "pooling_kernel_size": whole(1, 16), **cls.options})
        vision = hf.get("vision_config") or {}
        return {
            "patch_size": int(own.get("patch_size") or vision.get("patch_size") or 16),
            "merge_size": int(own.get("pooling_kernel_size") or vision.get("pooling_kernel_size") or 3),
            "max_soft_tokens": int(own.get("max_soft_tokens") or 280),
            "resample": int(own.get("resample", 3)),
        }

    @property
    def around(self) -> tuple[str, str]:
        """See Processor."""
        return str(self.settings["begin"]), str(self.settings["end"])

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        patch, merge, most = (self.settings[name] for name in ("patch_size", "merge_size", "max_soft_tokens"))
        width, height = size
        scale = math.sqrt(most * merge**2 * patch**2 / (width * height))
        columns, rows = (math.floor(scale * side / (patch * merge)) for side in size)
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        grid = 1, rows * merge, columns * merge
        return Layout((columns * merge * patch, rows * merge * patch), grid, ((self.placeholder, rows * columns),))

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [1, 3, height, width]."""
        return channels_first(resized(image, layout.size, self.settings["resample"]))[None]

    def low(self) -> dict[str, Any]:
        """See Processor."""
        return {**self.settings, "max_soft_tokens": min(LOW_TOKENS, self.settings["max_soft_tokens"])}
