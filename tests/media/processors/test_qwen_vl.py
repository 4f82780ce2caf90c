"""Qwen's processor, judged by transformers' own: patches after its rescaling and normalising, grids, limits."""

from __future__ import annotations

import numpy as np
import pytest

from app.errors import CheckpointError, InvalidRequestError
from app.media.processors.qwen_vl import QwenVLProcessor
from tests.media.pictures import picture

SIZES = [(56, 56), (57, 83), (3, 4), (640, 200), (1, 190), (301, 450), (28, 5000)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("own", [{}, {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 90000}}])
def test_patches_are_transformers(size: tuple[int, int], own: dict) -> None:
    judge_of = pytest.importorskip(
        "transformers"
    ).models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil
    judge = judge_of(**own)
    processor = QwenVLProcessor({**QwenVLProcessor.settings_of(own, {}), "placeholder": "<|image_pad|>"})
    image = picture(*size)
    expected = judge(image, return_tensors="np")
    layout = processor.layout(size)
    assert [layout.grid] == [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
    assert layout.num_tokens == np.prod(layout.grid) // 4
    found = processor.pixels(np.asarray(image), layout).astype(np.float32) / 255
    mean, std = (np.asarray(one, np.float32).reshape(3, 1, 1) for one in (judge.image_mean, judge.image_std))
    twice = np.repeat(((found - mean) / std)[:, :, None], judge.temporal_patch_size, axis=2)
    np.testing.assert_allclose(twice.reshape(len(found), -1), expected["pixel_values"], atol=1e-5)


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
