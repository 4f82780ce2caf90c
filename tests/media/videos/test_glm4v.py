"""Videos of GLM's models, judged by transformers' own steps, as those of Qwen's are: which frames, which size, which
texts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import CheckpointError
from app.media.processors.base import resized
from app.media.videos.clip import Clip
from app.media.videos.glm4v import Glm4vVideos
from tests.media.videos.clips import frames
from tests.media.videos.torchvision_stand_in import video_processor

KINDS = {"glm4v": "Glm4v", "glm46v": "Glm46V"}
SIZES = [(64, 48), (640, 360), (1920, 1080), (30, 1000), (20, 20), (333, 555)]
SMALL = {"size": {"shortest_edge": 4096, "longest_edge": 300_000}}


def made(kind: str, **own: Any) -> Glm4vVideos:
    settings = Glm4vVideos.settings_of({"video_processor_type": f"{KINDS[kind]}VideoProcessor", **own}, {})
    return Glm4vVideos({**settings, "placeholder": "V", "piece": "P"})


@pytest.mark.parametrize("own", [{}, {"fps": 1.0, "max_duration": 5}])
@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_transformers(kind: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cls = video_processor(kind, f"{KINDS[kind]}VideoProcessor", monkeypatch)
    processor = made(kind, **own)
    self = SimpleNamespace(fps=own.get("fps", 2), max_duration=own.get("max_duration", 300), temporal_patch_size=2)
    for total in (8, 9, 30, 77, 250, 2400, 20_000):
        for fps in (8.0, 24.0, 30_000 / 1001, 60.0):
            told = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
            expected = cls.sample_frames(self, told).tolist() or [0, 0]  # 4.6V's chooses none of a tenth of a second
            assert list(processor.indices(Clip((64, 48), total, fps))) == expected


@pytest.mark.parametrize("own", [{}, SMALL])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_transformers(kind: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cls = video_processor(kind, f"{KINDS[kind]}VideoProcessor", monkeypatch)
    resize = importlib.import_module(f"transformers.models.{kind}.video_processing_{kind}").__dict__["smart_resize"]
    edges = own.get("size") or cls.size
    for size in SIZES:
        for count in (4, 10, 31):
            layout = made(kind, **own).layout(Clip(size, count, 8.0, is_chosen=True))
            bounds = {"min_pixels": edges["shortest_edge"], "max_pixels": edges["longest_edge"]}
            assert layout.size[::-1] == resize(count, size[1], size[0], factor=28, temporal_factor=2, **bounds)
            assert layout.grid == (-(-count // 2), layout.size[1] // 14, layout.size[0] // 14)


def test_patches_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = video_processor("glm4v", "Glm4vVideoProcessor", monkeypatch)
    processor = made("glm4v", **SMALL)
    layout = processor.layout(Clip((100, 70), 7, 8.0, is_chosen=True))
    own = np.stack([resized(one, layout.size, processor.resample) for one in frames(7, 100, 70)])
    patches, *grid = cls.patchify(None, torch.from_numpy(own).permute(0, 3, 1, 2)[None], 14, 2, 2)
    assert layout.grid == tuple(grid)
    assert (torch.from_numpy(processor.pixels(own, layout).copy()).flatten(1) == patches[0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str) -> None:
    judge: Any = importlib.import_module(f"transformers.models.{kind}.processing_{kind}")
    cls = judge.__dict__[f"{KINDS[kind]}Processor"]
    self = SimpleNamespace(image_token="P", video_processor=SimpleNamespace(merge_size=2))
    self.replace_frame_token_id = lambda *args, **named: cls.replace_frame_token_id(self, *args, **named)
    metadata = importlib.import_module("transformers.video_utils").VideoMetadata
    for total, fps in ((77, 30_000 / 1001), (500, 24.0), (9, 8.0)):
        clip = Clip((64, 48), total, fps)
        processor = made(kind)
        layout = processor.layout(clip)
        shown = list(processor.indices(clip))
        told = {
            "video_grid_thw": [np.asarray(layout.grid)],
            "video_metadata": [metadata(total_num_frames=total, fps=fps, frames_indices=shown)],
        }
        text = "".join(text * count for text, count in layout.runs)
        assert text == cls.replace_video_token(self, told, 0)
        assert layout.num_tokens >= layout.grid[0] * layout.grid[1] * layout.grid[2] // 4
    assert (processor.around_pad, processor.written) == (None, "V")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_short_videos_are_shown(kind: str, count: int) -> None:
    clip = Clip((64, 48), count, 30.0)
    shown = list(made(kind).indices(clip))
    assert len(shown) % 2 == 0
    assert set(shown) <= set(range(count))
    assert made(kind).layout(clip).grid[0] == len(shown) // 2


def test_what_is_refused() -> None:
    with pytest.raises(CheckpointError, match="max_duration"):
        made("glm4v", max_duration="long")
