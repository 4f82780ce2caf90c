"""Pictures for the tests, made on the fly."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int = 60, height: int = 40, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A picture of smooth noise, in which every turn and every shift shows."""
    rng = np.random.default_rng([seed, width, height])
    coarse = rng.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
