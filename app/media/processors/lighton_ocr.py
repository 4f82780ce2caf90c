"""Pictures of LightOnOCR: Pixtral's, without tokens between and behind rows."""

from __future__ import annotations

from dataclasses import replace

from app.media.processors.base import Layout, Size
from app.media.processors.pixtral import PixtralProcessor


class LightOnOcrProcessor(PixtralProcessor):
    """Prepares as transformers' LightOnOcrProcessor does."""

    def layout(self, size: Size) -> Layout:
        """See Processor."""
        layout = super().layout(size)
        seen = sum(count for text, count in layout.runs if text == self.placeholder)
        return replace(layout, runs=((self.placeholder, seen),))
