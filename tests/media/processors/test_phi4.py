"""Phi-4's pictures, by a plain reading of transformers' rules, which want torchvision: tiles, patches, tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from app.errors import CheckpointError, InvalidRequestError
from app.media.processors.phi4 import Phi4Processor
from tests.media.pictures import picture

SIDE, PATCH = 56, 14
HF = {"vision_config": {"crop_size": SIDE, "patch_size": PATCH}}
SIZES = [(56, 56), (57, 20), (20, 57), (200, 90), (500, 499), (700, 60), (113, 61)]


def made(most: int = 6) -> Phi4Processor:
    own = {"size": {"height": SIDE, "width": SIDE}, "dynamic_hd": most}
    return Phi4Processor({**Phi4Processor.settings_of(own, HF), "placeholder": "<p>"})


def read(width: int, height: int, most: int) -> tuple[tuple[int, int], tuple[int, int], np.ndarray, int]:
    """Tiles, the size in them, the mask of patches [rows, columns] and the number of tokens."""
    wide, high = math.ceil(width / SIDE), math.ceil(height / SIDE)
    if wide * high > most:
        ratios = {
            (i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if 1 <= i * j <= most
        }
        best, apart = (1, 1), float("inf")
        for ratio in sorted(ratios, key=lambda x: x[0] * x[1]):
            own = abs(width / height - ratio[0] / ratio[1])
            if own < apart:
                apart, best = own, ratio
            elif own == apart and width * height > 0.5 * SIDE * SIDE * ratio[0] * ratio[1]:
                best = ratio
        wide, high = best
    across, down = wide * SIDE / width, high * SIDE / height
    if across < down:
        size = wide * SIDE, int(height * across)
    else:
        size = int(width * down), high * SIDE
    count = SIDE // PATCH
    mask = np.ones((high * count, wide * count), bool)
    empty = wide * SIDE - size[0], high * SIDE - size[1]
    if empty[0] >= PATCH:
        mask[:, -(empty[0] // PATCH) :] = False
    if empty[1] >= PATCH:
        mask[-(empty[1] // PATCH) :] = False
    seen = mask[::2, ::2]
    whole = (count // 2) ** 2
    return (wide, high), size, mask, whole + 1 + int(seen.sum()) + int(seen[:, 0].sum()) + count // 2


@pytest.mark.parametrize("most", [1, 6, 36])
def test_tiles_and_tokens(most: int) -> None:
    processor = made(most)
    for i, (width, height) in enumerate(SIZES):
        if most == 1 and width > 10 * height:
            continue
        (wide, high), size, mask, num_tokens = read(width, height, most)
        layout = processor.layout((width, height))
        assert layout.grid == (high, int(mask[:, 0].sum()), int(mask[0].sum()))
        assert layout.num_tokens == num_tokens
        image = picture(width, height, seed=i)
        canvas = Image.new("RGB", (wide * SIDE, high * SIDE), "white")
        canvas.paste(image.resize(size, Image.Resampling.BILINEAR) if image.size != size else image)
        found = processor.pixels(np.asarray(image), layout)
        assert found.shape == (wide * high, 3, SIDE, SIDE)
        laid = found.reshape(high, wide, 3, SIDE, SIDE).transpose(0, 3, 1, 4, 2).reshape(high * SIDE, wide * SIDE, 3)
        np.testing.assert_array_equal(laid, np.asarray(canvas))


def test_what_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="900 x 6 pixels, which are 56 x 0 in its tiles"):
        made(1).layout((900, 6))
    with pytest.raises(CheckpointError, match=r"the side of tiles is 28, which contradicts vision_config\.crop_size"):
        Phi4Processor.settings_of({"size": {"height": 28, "width": 28}}, HF)
    assert made().low()["dynamic_hd"] == 1
