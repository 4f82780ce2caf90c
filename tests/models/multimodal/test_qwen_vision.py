"""Encoders of the Qwen family: odd grids, videos and several pictures at a time give what transformers' give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.errors import CheckpointError
from app.models.multimodal.base import Picture
from app.models.multimodal.qwen_vision import QwenVision
from app.models.multimodal.vision_config import VisionConfig
from tests.tiny_media import MEAN, STD, media_judge, tiny_media_model
from tests.worker.worker_driver import Driver

GRIDS = [(1, 6, 10), (3, 4, 2), (1, 2, 2), (2, 10, 14)]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_frames_and_grids(name: str) -> None:
    encoder: Any = Driver(str(tiny_media_model(name)), max_model_len=64, num_blocks=8).worker._parts.model.encoder  # type: ignore[union-attr]
    assert isinstance(encoder, QwenVision)
    torch.manual_seed(0)
    shapes = [(frames * rows * columns, 3, 2, 4, 4) for frames, rows, columns in GRIDS]
    pixels = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes]
    mean, std = (torch.tensor(one).view(1, 3, 1, 1, 1) for one in (MEAN, STD))
    flat = torch.cat([((x.float() / 255 - mean) / std).flatten(1) for x in pixels])
    judge: Any = media_judge(tiny_media_model(name)).model.visual
    with torch.inference_mode():
        found = encoder([Picture(x, grid) for x, grid in zip(pixels, GRIDS, strict=True)])
        expected = judge(flat, grid_thw=torch.tensor(GRIDS))
    assert found.shape[1] == sum(encoder.num_tokens(grid) for grid in GRIDS)
    torch.testing.assert_close(found[0], expected.pooler_output, atol=1e-4, rtol=1e-4)
    for own, deep in zip(found[1:], getattr(expected, "deepstack_features", ()), strict=True):
        torch.testing.assert_close(own, deep, atol=1e-4, rtol=1e-4)


def test_unusable_fields_are_named() -> None:
    info = ModelInfo(tiny_media_model("qwen3_vl"), {"vision_config": {"depth": 0}}, {})
    with pytest.raises(CheckpointError, match=r"vision_config\.depth is 0"):
        VisionConfig(info, {})
    info = ModelInfo(info.directory, {"vision_config": {"patch_size": [4, 5]}}, {})
    with pytest.raises(CheckpointError, match="lacks num_heads"):
        VisionConfig(info, {}).whole("num_heads")
    with pytest.raises(CheckpointError, match="no square"):
        VisionConfig(info, {}).side("patch_size")
