"""Pictures of Kimi-VL and Kimi K2.5: as they are where they are small enough, with black behind and below up to whole
groups of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.fields.kinds import FLAG, Kind, either, several, whole
from app.media.processors.base import COUNT, LOW_SIDE, SIDE, Layout, Pixels, Processor, Size, checked, resized, side_of
from app.media.processors.qwen_vl import grouped_patches


class KimiProcessor(Processor):
    """Prepares as the published processors do, whose limits have names of their own, and transformers'."""

    options: ClassVar[Mapping[str, Kind]] = {"max_patches": COUNT}
    refused: ClassVar[Mapping[str, bool]] = {**Processor.refused, "pad_input": False}

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        limits = ("max_patches", "in_patch_limit", "in_token_limit")
        merge = either(whole(1, 16), several(whole(1, 16), 2, 2))
        checked(
            own, {**dict.fromkeys(limits, COUNT), "patch_size": SIDE, "pad_input": FLAG, "merge_kernel_size": merge}
        )
        vision = hf.get("vision_config") or {}
        sides = vision.get("merge_kernel_size", own.get("merge_kernel_size", 2))
        usual = 4096 if hf.get("model_type") == "kimi_vl" else 16_384
        return {
            "patch_size": int(own.get("patch_size") or vision.get("patch_size") or 14),
            "merge_size": sides if isinstance(sides, int) else int(sides[0]),
            "max_patches": next((int(own[name]) for name in limits if name in own), usual),
            "max_side": side_of(own.get("patch_limit_on_one_side") or own.get("size"), "max_height") or 512,
            "resample": int(own.get("resample", 3)),
        }

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        patch, most, longest = (self.settings[name] for name in ("patch_size", "max_patches", "max_side"))
        group = patch * self.settings["merge_size"]
        patches = math.prod(max(1, side // patch) for side in size)
        scale = min(1.0, math.sqrt(most / patches), *(longest * patch / side for side in size))
        wide, high = (min(max(1, int(side * scale)), longest * patch) for side in size)
        columns, rows = (-(-side // group) * self.settings["merge_size"] for side in (wide, high))
        tokens = rows * columns // self.settings["merge_size"] ** 2
        return Layout((wide, high), (1, rows, columns), ((self.placeholder, tokens),))

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [patches, 3, patch, patch]; patches of one token follow each other."""
        _, rows, columns = layout.grid
        patch, (wide, high) = self.settings["patch_size"], layout.size
        whole_groups = np.zeros((rows * patch, columns * patch, 3), np.uint8)
        whole_groups[:high, :wide] = resized(image, layout.size, self.settings["resample"])
        return grouped_patches(whole_groups, patch, self.settings["merge_size"])

    def low(self) -> dict[str, Any]:
        """See Processor."""
        most = max(1, LOW_SIDE // self.settings["patch_size"]) ** 2
        return {**self.settings, "max_patches": min(most, self.settings["max_patches"])}
