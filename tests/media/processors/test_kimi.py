"""Pictures of Kimi-VL and Kimi K2.5, by a plain reading of the published rules: transformers' processor wants
torchvision."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.errors import CheckpointError
from app.media.processors.kimi import KimiProcessor
from tests.media.pictures import picture

PATCH, MERGE, MOST, LONGEST = 4, 2, 24, 12
SIZES = [(8, 8), (9, 7), (40, 24), (3, 5), (400, 9), (5, 300), (61, 43), (1, 1)]
K25 = {"patch_size": PATCH, "merge_kernel_size": MERGE, "in_patch_limit": MOST, "patch_limit_on_one_side": LONGEST}
KIMI_VL = {"patch_size": PATCH, "merge_kernel_size": [MERGE, MERGE], "in_token_limit": MOST, "pad_input": True}
TRANSFORMERS = {"patch_size": PATCH, "merge_size": MERGE, "max_patches": MOST, "size": {"max_height": 12}}


def made(own: dict[str, Any]) -> KimiProcessor:
    settings = KimiProcessor.settings_of(own, {"vision_config": {"patch_size": PATCH}})
    return KimiProcessor({**settings, "placeholder": "<|media_pad|>"})


def judged(image: Image.Image, longest: float) -> np.ndarray:
    """Patches row by row, [rows, columns, 3, patch, patch]."""
    width, height = image.size
    patches = max(1, width // PATCH) * max(1, height // PATCH)
    scale = min(1.0, math.sqrt(MOST / patches), longest * PATCH / width, longest * PATCH / height)
    image = image.resize((max(1, int(width * scale)), max(1, int(height * scale))), Image.Resampling.BICUBIC)
    group = PATCH * MERGE
    canvas = Image.new("RGB", tuple(side + (group - side % group) % group for side in image.size))
    canvas.paste(image, (0, 0))
    columns, rows = (side // PATCH for side in canvas.size)
    return np.stack(
        [
            np.stack([np.asarray(canvas.crop((x, y, x + PATCH, y + PATCH))) for x in range(0, columns * PATCH, PATCH)])
            for y in range(0, rows * PATCH, PATCH)
        ]
    ).transpose(0, 1, 4, 2, 3)


@pytest.mark.parametrize(("own", "longest"), [(K25, LONGEST), (KIMI_VL, 512), (TRANSFORMERS, LONGEST)])
def test_patches_and_tokens(own: dict[str, Any], longest: float) -> None:
    processor = made(own)
    for size in SIZES:
        image = picture(*size)
        expected, layout = judged(image, longest), processor.layout(size)
        rows, columns = expected.shape[:2]
        assert layout.grid == (1, rows, columns)
        assert layout.runs == (("<|media_pad|>", rows * columns // MERGE**2),)
        found = processor.pixels(np.asarray(image), layout)
        found = found.reshape(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, PATCH, PATCH).swapaxes(1, 2)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected, err_msg=str(size))


def test_limits() -> None:
    usual = KimiProcessor.settings_of({}, {"model_type": "kimi_k25"})
    assert (usual["max_patches"], usual["max_side"], usual["patch_size"]) == (16_384, 512, 14)
    assert KimiProcessor.settings_of({}, {"model_type": "kimi_vl"})["max_patches"] == 4096
    low = KimiProcessor({**usual, "placeholder": "x"}).low()
    assert KimiProcessor(low).layout((4096, 4096)).num_tokens == 18**2
    with pytest.raises(CheckpointError, match="in_patch_limit is 0"):
        KimiProcessor.settings_of({"in_patch_limit": 0}, {})
    with pytest.raises(CheckpointError, match="merge_kernel_size is"):
        KimiProcessor.settings_of({"merge_kernel_size": "2"}, {})
