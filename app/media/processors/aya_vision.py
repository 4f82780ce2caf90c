"""Pictures of Aya Vision: InternVL's tiles, each behind its number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.fields.kinds import check, whole
from app.media.processors.base import Layout, Size
from app.media.processors.internvl import InternVLProcessor

BEGIN, END = "<|START_OF_IMG|>", "<|END_OF_IMG|>"


def ratio_of(hf: Mapping[str, Any]) -> float:
    """The share of a side's patches that become tokens, by config.json."""
    check(hf, {"downsample_factor": whole(1, 16)}, "config.json")
    return 1 / float(hf.get("downsample_factor") or 2)


class AyaVisionProcessor(InternVLProcessor):
    """Prepares as transformers' AyaVisionProcessor does."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor; `patch_size` and `downsample_factor` of the processor's file are what a token covers."""
        return super().settings_of(own, {**hf, "downsample_ratio": ratio_of(hf)})

    @property
    def written(self) -> str:
        """See MediaProcessor."""
        return "<image>"

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        plain = super().layout(size)
        seen, tiles = (self.placeholder, self.settings["num_tokens"]), plain.grid[0]
        runs = [run for i in range(1, tiles) for run in ((f"TILE_{i}", 1), seen)]
        return Layout(plain.size, plain.grid, ((BEGIN, 1), *runs, ("TILE_GLOBAL", 1), seen, (END, 1)))
