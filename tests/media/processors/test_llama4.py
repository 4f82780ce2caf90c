"""Llama 4's processor, whose judge wants torchvision: a plain reading of its rules with Pillow and NumPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from PIL import Image

from app.media.processors.llama4 import Llama4Processor
from tests.media.pictures import picture

SIDE, MOST = 32, 6


def best_canvas(width: int, height: int, largest: bool) -> tuple[int, int]:
    """Height and width of the canvas: over all products of at most MOST tiles."""
    canvases = [(i * SIDE, j * SIDE) for i, j in itertools.product(range(1, MOST + 1), repeat=2) if i * j <= MOST]
    scales = [np.float32(min(h / height, w / width)) for h, w in canvases]
    up = [scale for scale in scales if scale >= 1]
    wanted = (max(up) if largest else min(up)) if up else max(scales)
    return min((c for c, s in zip(canvases, scales, strict=True) if s == wanted), key=lambda c: c[0] * c[1])


def judged(image: Image.Image, largest: bool) -> tuple[np.ndarray, tuple[int, int]]:
    width, height = image.size
    high, wide = best_canvas(width, height, largest)
    most_high = high if largest else min(max(height, SIDE), high)
    most_wide = wide if largest else min(max(width, SIDE), wide)
    if most_wide / width < most_high / height:
        new = most_wide, min(math.floor(height * (most_wide / width)), most_high)
    else:
        new = min(math.floor(width * (most_high / height)), most_wide), most_high
    canvas = Image.new("RGB", (wide, high))
    canvas.paste(image.resize((max(new[0], 1), max(new[1], 1)), Image.Resampling.BILINEAR), (0, 0))
    tiles = [
        np.asarray(canvas.crop((x, y, x + SIDE, y + SIDE))) for y in range(0, high, SIDE) for x in range(0, wide, SIDE)
    ]
    if len(tiles) > 1:
        tiles.append(np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))
    return np.stack(tiles).transpose(0, 3, 1, 2), (high // SIDE, wide // SIDE)


@pytest.mark.parametrize("largest", [False, True])
def test_tiles_and_tokens(largest: bool) -> None:
    processing = pytest.importorskip("transformers").models.llama4.processing_llama4.Llama4Processor
    own = {"size": {"height": SIDE, "width": SIDE}, "max_patches": MOST, "resize_to_max_canvas": largest}
    settings = Llama4Processor.settings_of(own, {"vision_config": {"patch_size": 8}})
    processor = Llama4Processor({**settings, "placeholder": "<|patch|>"})
    assert processor.written == "<|image|>"
    for i, size in enumerate([(32, 32), (97, 31), (20, 75), (3, 200), (300, 170), (64, 64), (65, 64), (1, 1)]):
        image = picture(*size, seed=i)
        expected, (rows, columns) = judged(image, largest)
        layout = processor.layout(size)
        np.testing.assert_array_equal(processor.pixels(np.asarray(image), layout), expected, err_msg=str(size))
        assert layout.grid == (len(expected), 4, 4)
        text = "".join(text * count for text, count in layout.runs)
        assert text == processing._prompt_split_image(None, (rows, columns), 4)
