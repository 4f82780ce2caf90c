"""Videos of Qwen's models, judged by transformers' own steps: which frames, which size, which patches. Its classes want
torchvision, of which only the resizing is called: that is torch's own interpolation."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.errors import InvalidRequestError
from app.media.processors.base import resized
from app.media.videos.clip import Clip
from app.media.videos.qwen_vl import Qwen2VLVideos, Qwen3VLVideos
from app.media.videos.video_processor import VideoProcessor
from tests.media.videos.clips import frames
from tests.media.videos.torchvision_stand_in import video_processor

CLASSES: dict[str, type[VideoProcessor]] = {"qwen2_vl": Qwen2VLVideos, "qwen3_vl": Qwen3VLVideos}
TOKENS = {"placeholder": "P", "begin": "B", "end": "E"}
SIZES = [(64, 48), (640, 360), (1920, 1080), (30, 1000), (20, 20), (333, 555)]
SMALL = {"size": {"shortest_edge": 4096, "longest_edge": 300_000}}


def made(name: str, own: dict[str, Any], **given: Any) -> VideoProcessor:
    return CLASSES[name]({**CLASSES[name].settings_of(own, {}), **TOKENS, **given})


def judge(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' class."""
    return video_processor(name, f"Qwen{name[4]}VLVideoProcessor", monkeypatch)


@pytest.mark.parametrize("given", [{}, {"num_frames": 7}, {"fps": 1.0, "max_frames": 20}])
@pytest.mark.parametrize("name", CLASSES)
def test_frames_are_those_of_transformers(name: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cls = judge(name, monkeypatch)
    processor = made(name, {}, **given)
    own = processor.settings
    limits = {"min_frames": own["min_frames"], "max_frames": own["max_frames"], "num_frames": None}
    self = SimpleNamespace(fps=own["fps"], temporal_patch_size=2, **limits)
    asked = {"num_frames": given["num_frames"]} if "num_frames" in given else {}
    if "num_frames" in given:
        self.fps = None
    for total in (8, 9, 30, 77, 250, 2400):
        for fps in (8.0, 24.0, 30_000 / 1001, 60.0):
            clip = Clip((64, 48), total, fps)
            expected = cls.sample_frames(self, SimpleNamespace(total_num_frames=total, fps=fps), **asked)
            assert list(processor.indices(clip)) == expected.tolist()[: len(expected)], (total, fps)


@pytest.mark.parametrize("own", [{}, SMALL, {"cap_pixels_per_frame": True, **SMALL}])
@pytest.mark.parametrize("name", CLASSES)
def test_sizes_are_those_of_transformers(name: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cls = judge(name, monkeypatch)
    processor, base = made(name, own), importlib.import_module("transformers.video_processing_utils")
    sizes: list[Any] = []
    monkeypatch.setattr(
        base.__dict__["BaseVideoProcessor"], "resize", lambda self, image, size, resample: sizes.append(size)
    )
    edges = SimpleNamespace(**(own.get("size") or cls.size))
    self = cls.__new__(cls)
    self.max_video_tokens = cls.max_video_tokens
    factor, is_capped = processor.settings["patch_size"] * 2, bool(own.get("cap_pixels_per_frame"))
    for size in SIZES:
        for count in (4, 10, 31):
            video = torch.empty(1, count, 3, size[1], size[0], dtype=torch.uint8, device="meta")
            cls.resize(self, video, edges, 3, factor, temporal_factor=2, cap_pixels_per_frame=is_capped)
            layout = processor.layout(Clip(size, count, 8.0, is_chosen=True))
            assert layout.size == (sizes[-1].width, sizes[-1].height), (size, count)
            side = processor.settings["patch_size"]
            assert layout.grid == (-(-count // 2), layout.size[1] // side, layout.size[0] // side)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("count", [6, 7])
def test_patches_are_those_of_transformers(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = judge(name, monkeypatch)
    processor = made(name, SMALL)
    shown = frames(count, 100, 70)
    layout = processor.layout(Clip((100, 70), count, 8.0, is_chosen=True))
    own = np.stack([resized(one, layout.size, processor.resample) for one in shown])
    tensor = torch.from_numpy(shown).permute(0, 3, 1, 2)
    high = (layout.size[1], layout.size[0])
    exact = torch.nn.functional.interpolate(tensor.float(), high, mode="bicubic", antialias=True, align_corners=False)
    expected = exact.round().clamp(0, 255)
    assert (torch.from_numpy(own).permute(0, 3, 1, 2) - expected).abs().max() <= 1
    patches, *grid = cls.patchify(
        None, torch.from_numpy(own).permute(0, 3, 1, 2)[None], processor.settings["patch_size"], 2, 2
    )
    assert layout.grid == tuple(grid)
    assert (torch.from_numpy(processor.pixels(own, layout).copy()).flatten(1) == patches[0]).all()


def test_times_are_those_of_transformers() -> None:
    """In words before each pair of frames, or in what their positions go by."""
    module = importlib.import_module("transformers.models.qwen3_vl.processing_qwen3_vl")
    clip = Clip((64, 48), 77, 30_000 / 1001)
    processor = made("qwen3_vl", SMALL)
    shown = list(processor.indices(clip))
    seconds = module.__dict__["Qwen3VLProcessor"]._calculate_timestamps(None, list(shown), clip.fps, 2)
    layout = processor.layout(clip)
    each = layout.grid[1] * layout.grid[2] // 4
    assert "".join(text * count for text, count in layout.runs) == "".join(
        f"<{second:.1f} seconds>B{'P' * each}E" for second in seconds
    )
    older = made("qwen2_vl", SMALL)
    count = len(older.indices(clip))
    metadata = importlib.import_module("transformers.video_utils").VideoMetadata(
        total_num_frames=77, fps=clip.fps, frames_indices=list(range(count))
    )
    layout = older.layout(clip)
    assert layout.seconds_per_frame == pytest.approx(2 / metadata.sampled_fps)
    assert layout.runs == (("P", layout.grid[0] * layout.grid[1] * layout.grid[2] // 4),)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_short_videos_are_shown(name: str, count: int) -> None:
    """transformers fails on one frame."""
    processor = made(name, SMALL)
    clip = Clip((64, 48), count, 30.0)
    layout = processor.layout(clip)
    shown = np.stack([resized(frames(count)[i], layout.size, 3) for i in processor.indices(clip)])
    assert processor.pixels(shown, layout).shape[0] == layout.grid[0] * layout.grid[1] * layout.grid[2]
    assert layout.grid[0] == (2 if len(processor.indices(clip)) > 2 else 1)


@pytest.mark.parametrize("name", CLASSES)
def test_narrow_videos_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="one side may be 200 times the other"):
        made(name, {}).layout(Clip((10, 9000), 8, 8.0))
