"""Processors that cut pictures into grids of patches, judged by transformers' own: patches after its rescaling and
normalising, grids, limits."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from app.errors import CheckpointError, InvalidRequestError
from app.media.processors.glm_ocr import GlmOcrProcessor
from app.media.processors.paddleocr_vl import PaddleOcrVlProcessor
from app.media.processors.qwen_vl import QwenVLProcessor
from tests.media.pictures import picture

SIZES = [(56, 56), (57, 83), (3, 4), (640, 200), (1, 190), (301, 450), (28, 5000)]
SMALL = {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 90000}}
JUDGES: dict[str, tuple[type[QwenVLProcessor], str, dict[str, Any]]] = {
    "qwen2_vl": (QwenVLProcessor, "Qwen2VLImageProcessorPil", {}),
    "qwen2_vl small": (QwenVLProcessor, "Qwen2VLImageProcessorPil", SMALL),
    "glm4v": (GlmOcrProcessor, "Glm4vImageProcessorPil", {}),
    "glm46v": (GlmOcrProcessor, "Glm46VImageProcessorPil", {}),
    "glm46v small": (GlmOcrProcessor, "Glm46VImageProcessorPil", SMALL),
    "paddleocr_vl": (PaddleOcrVlProcessor, "PaddleOCRVLImageProcessorPil", {}),
    "paddleocr_vl small": (PaddleOcrVlProcessor, "PaddleOCRVLImageProcessorPil", SMALL),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", JUDGES)
def test_patches_are_transformers(size: tuple[int, int], name: str) -> None:
    family, kind, own = JUDGES[name]
    module = name.split()[0]
    judge = getattr(importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}"), kind)(**own)
    processor = family({**family.settings_of(own, {}), "placeholder": "<|image_pad|>"})
    image = picture(*size)
    expected = judge(image, return_tensors="np")
    layout = processor.layout(size)
    assert [layout.grid] == [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
    assert layout.num_tokens == np.prod(layout.grid) // 4
    found = processor.pixels(np.asarray(image), layout).astype(np.float32) / 255
    mean, std = (np.asarray(one, np.float32).reshape(3, 1, 1) for one in (judge.image_mean, judge.image_std))
    found = (found - mean) / std
    if family is PaddleOcrVlProcessor:  # its patches lie row by row
        _, rows, columns = layout.grid
        found = found.reshape(rows // 2, columns // 2, 2, 2, *found.shape[1:]).swapaxes(1, 2).reshape(found.shape)
    twice = np.repeat(found[:, :, None], judge.temporal_patch_size, axis=2)
    np.testing.assert_allclose(
        twice.reshape(len(found), -1), expected["pixel_values"].reshape(len(found), -1), atol=1e-5
    )


def test_what_it_does_not_take() -> None:
    processor = QwenVLProcessor({**QwenVLProcessor.settings_of({}, {}), "placeholder": "x"})
    with pytest.raises(InvalidRequestError, match="one side may be 200 times the other"):
        processor.layout((1, 201))
    with pytest.raises(CheckpointError, match="patch_size is 0"):
        QwenVLProcessor.settings_of({"patch_size": 0}, {})
    with pytest.raises(CheckpointError, match="size is 'x'"):
        QwenVLProcessor.settings_of({"size": {"shortest_edge": "x"}}, {})
    low = QwenVLProcessor(processor.low()).layout((2000, 2000))
    assert low.size == (504, 504)
    assert processor.layout((2000, 2000)).size > low.size
