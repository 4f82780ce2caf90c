"""Pictures of Gemma 3: squares of one size, between texts that stand around each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from app.checkpoints.fields.kinds import FLAG
from app.media.processors.base import (
    COUNT,
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


class Gemma3Processor(Processor):
    """Prepares as transformers' Gemma3ImageProcessor does where it does not pan and scan."""

    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {
        "begin": ("boi_token_index", 255_999),
        "end": ("eoi_token_index", 256_000),
    }
    refused: ClassVar[Mapping[str, bool]] = {**Processor.refused, "do_pan_and_scan": True}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        width, height = self._size = settings["size"][0], settings["size"][1]
        patch = settings["patch_size"]
        runs = ((self.placeholder, settings["num_tokens"]),)
        self._layout = Layout(self._size, (1, height // patch, width // patch), runs)

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        checked(own, {"image_seq_length": COUNT, "do_pan_and_scan": FLAG})
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
        }

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
        return self._layout

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [1, 3, height, width]."""
        return channels_first(resized(image, layout.size, self.settings["resample"]))[None]
