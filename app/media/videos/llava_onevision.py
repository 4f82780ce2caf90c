"""Videos of LLaVA-OneVision: each frame is a tile, whose tokens are half as many along each side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from app.checkpoints.fields.kinds import Kind, whole
from app.media.processors.base import SIDE, Layout, Pixels, agree, checked, side_of
from app.media.processors.llava_onevision import of_video
from app.media.videos.clip import Clip
from app.media.videos.video_processor import VideoProcessor

USUAL_FRAMES = 32


class LlavaOnevisionVideos(VideoProcessor):
    """Prepares as transformers' LlavaOnevisionVideoProcessor does, once it samples frames: 32 in even steps."""

    options: ClassVar[Mapping[str, Kind]] = {"num_frames": whole(1, 4096)}
    refused: ClassVar[Mapping[str, bool]] = {"do_resize": False, "do_center_crop": True}

    @classmethod
    def settings_of(cls, own: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
        """See MediaProcessor."""
        checked(own, {**cls.options, "patch_size": SIDE}, "the video processor")
        vision = hf.get("vision_config") or {}
        built = vision.get("image_size")
        side = side_of(own.get("size"), "height", "shortest_edge") or int(built or 384)
        agree("the side of frames", side, "vision_config.image_size", built)
        return {
            "side": side,
            "patch_size": int(vision.get("patch_size") or 14),
            "num_frames": int(own.get("num_frames") or USUAL_FRAMES),
            "resample": int(own.get("resample", 3)),
        }

    def indices(self, clip: Clip) -> Sequence[int]:
        """See VideoProcessor."""
        total = clip.num_frames
        if clip.is_chosen:
            return range(total)
        count = min(self.settings["num_frames"], total)
        return [int(i * (total / count)) for i in range(count)]

    def layout(self, clip: Clip) -> Layout:
        """See VideoProcessor."""
        num_frames, side = len(self.indices(clip)), self.settings["side"]
        grid, num_tokens = of_video(num_frames, side // self.settings["patch_size"])
        seconds = clip.num_frames / num_frames / clip.fps
        return Layout((side, side), grid, ((self.placeholder, num_tokens),), seconds)

    def pixels(self, frames: Pixels, layout: Layout) -> Pixels:
        """[n, H, W, 3] -> [n, 3, H, W]."""
        return frames.transpose(0, 3, 1, 2)
