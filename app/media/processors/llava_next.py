"""Pictures of LLaVA-NeXT and Granite Vision: as LLaVA-OneVision's, in shapes of their own and never shrunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.fields.kinds import TEXT
from app.media.processors.base import COUNT, SIDE, agree, checked, side_of
from app.media.processors.llava_onevision import MOST_TILES, LlavaOnevisionProcessor, shapes_of, sides_of

SIDES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]  # heights and widths, where none are named
_DEFAULT_SIDE, _DEFAULT_PATCH = 336, 14


class LlavaNextProcessor(LlavaOnevisionProcessor):
    """Prepares as transformers' LlavaNextImageProcessor does."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        kinds = {"num_additional_image_tokens": COUNT, "vision_feature_select_strategy": TEXT, "patch_size": SIDE}
        checked(own, kinds)
        vision = hf.get("vision_config") or {}
        built = int(vision.get("image_size") or _DEFAULT_SIDE)
        side = side_of(own.get("size"), "height", "shortest_edge") or built
        crop = side_of(own.get("crop_size"), "height", "shortest_edge") if own.get("do_center_crop", True) else None
        agree("the side of tiles", side, "vision_config.image_size", built)
        agree("crop_size", crop or side, "vision_config.image_size", built)
        if (strategy := own.get("vision_feature_select_strategy")) is not None:
            agree("vision_feature_select_strategy", strategy, "it", hf.get("vision_feature_select_strategy"))
        return {
            "side": side,
            "patches": side // int(vision.get("patch_size") or _DEFAULT_PATCH),
            "shapes": shapes_of(sides_of(own, hf, usual=SIDES), side),
            "most": MOST_TILES,
            "resample": int(own.get("resample", 3)),
        }
