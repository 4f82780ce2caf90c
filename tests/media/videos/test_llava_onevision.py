"""LLaVA-OneVision's videos: frames in even steps, tiles of one size, tokens by transformers' rule."""

from __future__ import annotations

import math

import numpy as np
import pytest

from app.errors import CheckpointError
from app.media.videos.clip import Clip
from app.media.videos.llava_onevision import LlavaOnevisionVideos

HF = {"vision_config": {"image_size": 48, "patch_size": 16}}


def made(**own: int) -> LlavaOnevisionVideos:
    return LlavaOnevisionVideos({**LlavaOnevisionVideos.settings_of(own, HF), "placeholder": "<v>"})


@pytest.mark.parametrize("total", [1, 5, 32, 33, 1000])
def test_frames_and_tokens(total: int) -> None:
    videos, clip = made(num_frames=8), Clip((90, 50), total, 25.0)
    count = min(8, total)
    assert list(videos.indices(clip)) == [int(i * total / count) for i in range(count)]
    layout = videos.layout(clip)
    assert layout.size == (48, 48)
    assert layout.runs == (("<v>", count * math.ceil(3 / 2) ** 2 + 1),)
    frames = np.random.default_rng(0).integers(0, 256, (count, 48, 48, 3), np.uint8)
    np.testing.assert_array_equal(videos.pixels(frames, layout)[0], frames[0].transpose(2, 0, 1))


def test_usual_and_refused() -> None:
    assert len(made().indices(Clip((90, 50), 100, 25.0))) == 32
    assert list(made().indices(Clip((90, 50), 40, 25.0, is_chosen=True))) == list(range(40))
    with pytest.raises(CheckpointError, match=r"the side of frames is 32, which contradicts vision_config\.image_size"):
        LlavaOnevisionVideos.settings_of({"size": {"height": 32, "width": 32}}, HF)
