"""Pictures of LLaVA 1.5 and others with CLIP's or SigLIP's encoder: all of one size, from the middle, or padded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.checkpoints.fields.kinds import FLAG, number, several
from app.errors import CheckpointError
from app.media.processors.base import (
    COUNT,
    Layout,
    Pixels,
    Processor,
    Size,
    agree,
    channels_first,
    check_ratio,
    checked,
    resized,
    side_of,
)

# The side of pictures and of patches that encoders have where config.json does not say it.
_SIDES = {"clip_vision_model": (224, 32), "siglip_vision_model": (224, 16)}
_MEAN = (0.48145466, 0.4578275, 0.40821073)  # OpenAI's, of CLIP


class ClipProcessor(Processor):
    """Prepares as transformers' CLIPImageProcessor and LlavaImageProcessor do: resize, then cut out the middle."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._crop: int | None = settings["crop"]
        self._short: int | None = settings["short"]
        self._side: int = settings["side"]
        rows = self._side // settings["patch_size"]
        self._layout = Layout((self._side, self._side), (1, rows, rows), ((self.placeholder, settings["num_tokens"]),))

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        mean = several(number(0, 1), 3, 3)
        checked(own, {"do_center_crop": FLAG, "do_pad": FLAG, "image_mean": mean, "num_additional_image_tokens": COUNT})
        vision = hf.get("vision_config") or {}
        short = side_of(own.get("size"), "shortest_edge")
        kind = str(vision.get("model_type") or "clip_vision_model")
        built, patch = (
            int(vision.get(name) or usual)
            for name, usual in zip(("image_size", "patch_size"), _SIDES.get(kind, (224, 16)), strict=True)
        )
        side = side_of(own.get("size"), "height") or short or built
        crop = side_of(own.get("crop_size"), "height", "shortest_edge") if own.get("do_center_crop", True) else None
        if crop is not None and crop > side:
            raise CheckpointError(f"the image processor: crop_size {crop} is more than size {side}", param="model")
        strategy = own.get("vision_feature_select_strategy") or hf.get("vision_feature_select_strategy") or "default"
        final = crop or side
        extra = int(kind.startswith("clip"))
        agree("num_additional_image_tokens", own.get("num_additional_image_tokens", extra), "vision_config", extra)
        agree("vision_feature_select_strategy", strategy, "it", hf.get("vision_feature_select_strategy"))
        agree("the side of pictures", final, "vision_config.image_size", built if vision else None)
        return {
            "short": short,
            "side": final,
            "resize": side,
            "crop": crop,
            "pad": [int(value * 255) for value in own.get("image_mean") or _MEAN] if own.get("do_pad") else None,
            "patch_size": patch,
            "num_tokens": (final // patch) ** 2 + extra - (strategy == "default" and extra > 0),
            "resample": int(own.get("resample", 3)),
        }

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        if self._short is not None and self.settings["pad"] is None:
            check_ratio(size)
        return self._layout

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [1, 3, side, side]."""
        if self.settings["pad"] is not None:
            image = _padded(image, self.settings["pad"])
        height, width = image.shape[:2]
        side = self.settings["resize"]
        size = (side, side)
        if self._short is not None:
            size = (side, int(side * height / width)) if width <= height else (int(side * width / height), side)
        image = resized(image, size, self.settings["resample"])
        if self._crop is not None:
            top, left = ((length - self._crop) // 2 for length in image.shape[:2])
            image = image[top : top + self._crop, left : left + self._crop]
        return channels_first(image)[None]


def _padded(image: Pixels, color: list[int]) -> Pixels:
    """The picture in the middle of a square."""
    height, width = image.shape[:2]
    side = max(height, width)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = color
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = image
    return square
