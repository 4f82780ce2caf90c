"""Command A Vision's processor. transformers' wants torchvision, so the functions by which it chooses tiles and writes
their tokens are taken out of its source; pixels are Pillow's."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.errors import CheckpointError
from app.media.processors.cohere2_vision import Cohere2VisionProcessor
from tests.media.pictures import picture
from tests.media.transformers_source import functions_of

SIDE = 16
OWN = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 6, "patch_size": 2}
EYES = {"vision_config": {"image_size": SIDE, "patch_size": 4}}
SIZES = [(16, 16), (17, 16), (8, 40), (97, 31), (20, 75), (3, 200), (300, 170), (1, 1), (48, 32), (33, 33)]


@lru_cache
def judge() -> dict[str, Any]:
    names = "get_all_supported_aspect_ratios", "get_optimal_tiled_canvas"
    tiles = functions_of("cohere2_vision", "image_processing_cohere2_vision", names, lru_cache=lru_cache, np=np)
    return {**tiles, **functions_of("cohere2_vision", "processing_cohere2_vision", ("replace_image_token",))}


def made(**own: Any) -> Cohere2VisionProcessor:
    return Cohere2VisionProcessor(
        {**Cohere2VisionProcessor.settings_of({**OWN, **own}, EYES), "placeholder": "<image>"}
    )


@pytest.mark.parametrize("most", [1, 2, 6, 12])
def test_tiles_and_tokens_are_those_of_transformers(most: int) -> None:
    names = SimpleNamespace(
        image_token="<image>", boi_token="<|START_OF_IMG|>", eoi_token="<|END_OF_IMG|>",
        img_line_break_token="<|IMG_LINE_BREAK|>", patch_size=2,
    )  # fmt: skip
    own = made(max_patches=most)
    for width, height in SIZES:
        columns, rows = judge()["get_optimal_tiled_canvas"]((height, width), (SIDE, SIDE), 1, most)
        layout = own.layout((width, height))
        count = columns * rows + (columns * rows > 1)
        assert (layout.size, layout.grid) == ((columns * SIDE, rows * SIDE), (count, 4, 4))
        text = "".join(text * count for text, count in layout.runs)
        assert text == judge()["replace_image_token"](names, {"num_patches": [count]}, 0)
    assert own.written == "<image>"


def test_pixels_are_tiles_row_by_row_and_the_whole() -> None:
    own = made()
    image = picture(40, 20)
    layout = own.layout((40, 20))
    assert layout.size == (48, 32)
    large = np.asarray(image.resize((48, 32), Image.Resampling.BICUBIC))
    found = own.pixels(np.asarray(image), layout)
    for number, tile in enumerate(found[:-1]):
        row, column = divmod(number, 3)
        expected = large[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE]
        np.testing.assert_array_equal(tile, expected.transpose(2, 0, 1))
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(found[-1], small.transpose(2, 0, 1))
    assert Cohere2VisionProcessor(own.low()).layout((40, 20)).grid == (1, 4, 4)


def test_what_contradicts_the_encoder() -> None:
    with pytest.raises(CheckpointError, match="image_seq_length is 9"):
        made(patch_size=3)
    with pytest.raises(CheckpointError, match="patch_size"):
        made(patch_size="two")
    for changed, field in (
        *(({"downsample_factor": wrong}, "downsample_factor") for wrong in ("x", [2], 1e-320, -2)),
        ({"vision_config": {"image_size": 10**9}}, "vision_config.image_size"),
    ):
        with pytest.raises(CheckpointError, match=f"config.json is not usable: {field}"):
            Cohere2VisionProcessor.settings_of({}, changed)
    usual = Cohere2VisionProcessor.settings_of({}, {"vision_config": {"image_size": 512}})
    assert (usual["side"], usual["num_tokens"], usual["max_patches"]) == (512, 256, 12)
