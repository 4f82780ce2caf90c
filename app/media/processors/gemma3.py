"""Pictures of Gemma 3: squares of one size, between texts that stand around each; with `do_pan_and_scan` the parts of a
long picture, too, each a square of its own behind words that say so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from app.checkpoints.fields.kinds import FLAG, Kind, number, whole
from app.media.processors.base import (
    COUNT,
    SIDE,
    Layout,
    Pixels,
    Processor,
    Size,
    agree,
    channels_first,
    checked,
    resized,
    side_of,
)

PARTS: Mapping[str, Kind] = {
    "do_pan_and_scan": FLAG,
    "pan_and_scan_min_crop_size": SIDE,
    "pan_and_scan_max_num_crops": whole(2, 16),
    "pan_and_scan_min_ratio_to_activate": number(1, 200),
}
USUAL = dict(zip(PARTS, (False, 256, 4, 1.2), strict=True))
BEFORE_WHOLE, BEFORE_PARTS = "Here is the original image ", " and here are some crops to help you see better "


class Gemma3Processor(Processor):
    """Prepares as transformers' Gemma3ImageProcessor does."""

    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {
        "begin": ("boi_token_index", 255_999),
        "end": ("eoi_token_index", 256_000),
    }
    options: ClassVar[Mapping[str, Kind]] = PARTS

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._size = settings["size"][0], settings["size"][1]

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        checked(own, {"image_seq_length": COUNT, **PARTS})
        vision = hf.get("vision_config") or {}
        side = int(vision.get("image_size") or 224)
        size = [side_of(own.get("size"), name) or side for name in ("width", "height")]
        agree("the size of pictures", size, "vision_config.image_size", [side, side] if vision else None)
        num_tokens = int(own.get("image_seq_length") or hf.get("mm_tokens_per_image") or 256)
        agree("image_seq_length", num_tokens, "mm_tokens_per_image", hf.get("mm_tokens_per_image"))
        return {
            "size": size,
            "patch_size": int(vision.get("patch_size") or 16),
            "num_tokens": num_tokens,
            "resample": int(own.get("resample", 2)),
            **{name: usual if own.get(name) is None else own[name] for name, usual in USUAL.items()},
        }

    def low(self) -> dict[str, Any]:
        """See MediaProcessor."""
        return {**self.settings, "do_pan_and_scan": False}

    @property
    def written(self) -> str:
        """See Processor."""
        return str(self.settings["begin"])

    @property
    def around(self) -> tuple[str, str]:
        """See Processor."""
        return f"\n\n{self.settings['begin']}", f"{self.settings['end']}\n\n"

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        (width, height), patch = self._size, self.settings["patch_size"]
        shown, count = (self.placeholder, self.settings["num_tokens"]), len(self._parts(size))
        grid = (1 + count, height // patch, width // patch)
        if not count:
            return Layout(self._size, grid, (shown,))
        begin, end = self.around
        between = ((f"{end} {begin}", 1), shown)
        runs = (shown, (f"{end}{BEFORE_PARTS}{begin}", 1), shown, *between * (count - 1))
        return Layout(self._size, grid, runs, before=BEFORE_WHOLE, is_apart=True)

    def _parts(self, size: Size) -> list[tuple[int, int, int, int]]:
        """Left, top, right and bottom of the parts of a picture of this size, along its longer side; none of one that
        is nearly square, or so small that its parts were."""
        s, long, short = self.settings, max(size), min(size)
        least = s["pan_and_scan_min_crop_size"]
        if not s["do_pan_and_scan"] or long / short < s["pan_and_scan_min_ratio_to_activate"]:
            return []
        count = min(math.floor(long / short + 0.5), long // least)
        count = min(max(2, count), s["pan_and_scan_max_num_crops"])
        step = math.ceil(long / count)
        if min(step, short) < least:
            return []
        ends = [(begin, min(begin + step, long)) for begin in range(0, min(count * step, long), step)]
        return [(a, 0, b, short) if size[0] >= size[1] else (0, a, short, b) for a, b in ends]

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [1 + parts, 3, height, width]."""
        parts = self._parts((image.shape[1], image.shape[0]))
        shown = [image, *(image[top:bottom, left:right] for left, top, right, bottom in parts)]
        return np.stack([channels_first(resized(one, layout.size, self.settings["resample"])) for one in shown])
