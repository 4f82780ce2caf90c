"""Pictures of GLM-OCR: Qwen's, each counted as the two frames that a patch has, narrow ones enlarged first."""

from __future__ import annotations

from typing import ClassVar

from app.media.processors.base import Size
from app.media.processors.qwen_vl import QwenVLProcessor


class GlmOcrProcessor(QwenVLProcessor):
    """Prepares as transformers' Glm46VImageProcessor does."""

    least: ClassVar[int] = 112 * 112
    most: ClassVar[int] = 28 * 28 * 15_000
    frames: ClassVar[int] = 2

    def enlarged(self, size: Size, group: int) -> Size:
        """See QwenVLProcessor."""
        if min(size) >= group:
            return size
        scale = max(group / side for side in size)
        return int(size[0] * scale), int(size[1] * scale)
