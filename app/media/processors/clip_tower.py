"""Pictures of CLIP and SigLIP themselves: one vector, so one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.media.processors.clip import ClipProcessor


class ClipTowerProcessor(ClipProcessor):
    """Prepares as transformers' CLIPImageProcessor and SiglipImageProcessor do."""

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See Processor."""
        return {**super().settings_of(own, hf), "num_tokens": 1}
