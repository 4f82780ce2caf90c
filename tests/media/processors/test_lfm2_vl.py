"""LFM2-VL's processor. transformers' wants torchvision, so the functions by which it chooses sizes and tiles are taken
out of its source; pixels are Pillow's."""

from __future__ import annotations

import math
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.errors import CheckpointError, InvalidRequestError
from app.media.processors.lfm2_vl import DEFAULTS, Lfm2VlProcessor
from tests.media.pictures import picture
from tests.media.transformers_source import functions_of

PATCH, TILE = 4, 16
OWN = {"encoder_patch_size": PATCH, "tile_size": TILE, "min_image_tokens": 3, "max_image_tokens": 9, "max_tiles": 6}
SIZES = [(8, 8), (9, 7), (40, 24), (3, 5), (400, 9), (5, 300), (61, 43), (1, 1), (100, 100), (50, 25), (20, 21)]
HELPERS = ("round_by_factor", "find_closest_aspect_ratio")
METHODS = ("_target_ratios", "_get_grid_layout", "smart_resize", "_is_image_too_large")


@lru_cache
def judge() -> dict[str, Any]:
    """transformers' functions, by name; methods take a `self`."""
    own = functions_of("lfm2_vl", "image_processing_lfm2_vl", (*HELPERS, *METHODS), math=math, lru_cache=lru_cache)
    return {**own, **functions_of("lfm2_vl", "processing_lfm2_vl", ("_build_image_tokens",))}


def made(**own: Any) -> Lfm2VlProcessor:
    return Lfm2VlProcessor({**Lfm2VlProcessor.settings_of({**OWN, **own}, {}), "placeholder": "<image>"})


def judged(size: tuple[int, int], told: dict[str, Any]) -> tuple[tuple[int, int], tuple[int, int], str]:
    """Width and height of the whole, columns and rows of tiles, and the text."""
    j, (width, height) = judge(), size
    patches = {"encoder_patch_size": PATCH, "downsample_factor": 2}
    own = SimpleNamespace(_target_ratios=lambda least, most: j["_target_ratios"](None, least, most))
    large = j["_is_image_too_large"](
        None, height, width, told["max_image_tokens"], max_pixels_tolerance=2.0, **patches
    )  # fmt: skip
    limits = {name: told[name] for name in ("min_image_tokens", "max_image_tokens")}
    wide, high = j["smart_resize"](None, height, width, **limits, **patches)
    columns = rows = 1
    if large and told["do_image_splitting"]:
        columns, rows, *_ = j["_get_grid_layout"](own, height, width, told["min_tiles"], told["max_tiles"], TILE)
    names = SimpleNamespace(
        image_token="<image>", image_start_token="<|image_start|>", image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
    )  # fmt: skip
    tokens, marks = ((TILE // PATCH // 2) ** 2, wide * high // (2 * PATCH) ** 2), told["use_image_special_tokens"]
    return (wide, high), (columns, rows), j["_build_image_tokens"](names, rows, columns, *tokens, True, marks)


def rows_of(image: Image.Image) -> np.ndarray:
    """A picture's patches row by row."""
    pixels = np.asarray(image)
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    return pixels.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 4, 1, 3)


@pytest.mark.parametrize(
    "own",
    [
        *({}, {"do_image_splitting": False}, {"min_tiles": 3, "max_image_tokens": 5}),
        {"use_image_special_tokens": False},
    ],
    ids=str,
)
def test_sizes_tiles_and_tokens_are_transformers_and_pixels_pillow_s(own: dict[str, Any]) -> None:
    processor, cut = made(**own), 0
    for size in SIZES:
        image, layout = picture(*size), processor.layout(size)
        whole, (columns, rows), text = judged(size, {**DEFAULTS, **OWN, **own})
        assert "".join(one * count for one, count in layout.runs) == text, size
        parts = [image.resize(whole, Image.Resampling.BILINEAR)]
        if columns * rows > 1:
            cut += 1
            large = image.resize((columns * TILE, rows * TILE), Image.Resampling.BILINEAR)
            corners = [(x * TILE, y * TILE) for y in range(rows) for x in range(columns)]
            parts = [*(large.crop((x, y, x + TILE, y + TILE)) for x, y in corners), *parts]
        assert layout.grid == (len(parts) - 1, whole[1] // PATCH, whole[0] // PATCH)
        found, done = processor.pixels(np.asarray(image), layout), 0
        for part in map(rows_of, parts):
            high, wide, count = part.shape[0] // 2, part.shape[1] // 2, part.shape[0] * part.shape[1]
            ours = found[done : done + count].reshape(high, wide, 2, 2, 3, PATCH, PATCH).swapaxes(1, 2)
            np.testing.assert_array_equal(ours.reshape(part.shape), part, err_msg=str(size))
            done += count
        assert done == len(found)
    assert (cut > 2) == own.get("do_image_splitting", True)


def test_without_the_whole_and_with_low_detail() -> None:
    layout = made(use_thumbnail=False).layout((100, 50))
    assert (layout.grid, layout.runs[-2]) == ((2, 0, 0), ("<image>", 4))
    assert len(made(use_thumbnail=False).pixels(np.asarray(picture(100, 50)), layout)) == 32
    assert Lfm2VlProcessor(made().low()).layout((100, 100)).grid == (0, 6, 6)
    assert made().settings["max_tiles"] == 6
    assert Lfm2VlProcessor.settings_of({}, {"max_tiles": 4, "tile_size": 256})["tile_size"] == 256


def test_what_is_refused() -> None:
    with pytest.raises(CheckpointError, match="tiles of 20 are not made of squares of 8"):
        made(tile_size=20)
    with pytest.raises(CheckpointError, match="max_tiles is 99"):
        made(max_tiles=99)
    with pytest.raises(InvalidRequestError, match="200 times"):
        made().layout((1, 201))
