"""Pictures of PaddleOCR-VL: Qwen's within other bounds, narrow ones enlarged first."""

from __future__ import annotations

from typing import ClassVar

from app.media.processors.base import Size
from app.media.processors.qwen_vl import QwenVLProcessor


class PaddleOcrVlProcessor(QwenVLProcessor):
    """Prepares as transformers' PaddleOCRVLImageProcessor does; patches of one token follow each other here."""

    least: ClassVar[int] = 384 * 384
    most: ClassVar[int] = 1536 * 1536

    def enlarged(self, size: Size, group: int) -> Size:
        """See QwenVLProcessor."""
        width, height = size
        if height < group:
            width, height = round(width * group / height), group
        if width < group:
            width, height = group, round(height * group / width)
        return width, height
