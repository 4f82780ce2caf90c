"""Pictures of InternVL as it is published: its config.json says how many tiles there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.fields.kinds import FLAG, check
from app.errors import UnsupportedError
from app.media.processors.base import SIDE
from app.media.processors.internvl import MAX_TILES, InternVLProcessor

_FIELDS = {
    **dict.fromkeys(("min_dynamic_patch", "max_dynamic_patch"), MAX_TILES),
    **dict.fromkeys(("dynamic_image_size", "use_thumbnail", "pad2square"), FLAG),
    "force_image_size": SIDE,
}


class InternVLChatProcessor(InternVLProcessor):
    """Prepares as the code beside the published files does, with its defaults for what config.json leaves out."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        told = {name: hf[name] for name in _FIELDS if hf.get(name) is not None}
        check(told, _FIELDS, "config.json")
        if told.get("pad2square"):
            raise UnsupportedError("pad2square: pictures are resized to tiles, not padded", param="model")
        tiles = {"min_patches": told.get("min_dynamic_patch", 1), "max_patches": told.get("max_dynamic_patch", 6)}
        side = {} if "size" in own else {"size": told.get("force_image_size")}
        is_cut = bool(told.get("dynamic_image_size", False))
        settings = super().settings_of({**tiles, **side, "crop_to_patches": is_cut, **own}, hf)
        return {**settings, "has_whole": bool(told.get("use_thumbnail", False))}

    @property
    def written(self) -> str:
        """See MediaProcessor."""
        return "<image>"
