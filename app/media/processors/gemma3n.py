"""Pictures of Gemma 3n: squares of one size, between texts that stand around each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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


class Gemma3nProcessor(Processor):
    """Prepares as transformers' SiglipImageProcessor does."""

    tokens: ClassVar[Mapping[str, tuple[str, int]]] = {
        "begin": ("boi_token_id", 255_999),
        "end": ("eoi_token_id", 262_144),
    }

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        checked(own, {"image_seq_length": COUNT})
        built = hf.get("vision_soft_tokens_per_image")
        num_tokens = int(own.get("image_seq_length") or built or 256)
        agree("image_seq_length", num_tokens, "vision_soft_tokens_per_image", built)
        size = [side_of(own.get("size"), name) or 768 for name in ("width", "height")]
        return {"size": size, "num_tokens": num_tokens, "resample": int(own.get("resample", 2))}

    @property
    def around(self) -> tuple[str, str]:
        """See Processor."""
        return f"\n\n{self.settings['begin']}", f"{self.settings['end']}\n\n"

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        width, height = self.settings["size"]
        side = int(self.settings["num_tokens"] ** 0.5)
        return Layout((width, height), (1, side, side), ((self.placeholder, self.settings["num_tokens"]),))

    def pixels(self, image: Pixels, layout: Layout) -> Pixels:
        """[H, W, 3] -> [1, 3, height, width]."""
        return channels_first(resized(image, layout.size, self.settings["resample"]))[None]
