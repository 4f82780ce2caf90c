"""Processors of videos, a family a line: the table."""

from __future__ import annotations

from app.media.videos.video_processor import VideoProcessor
from app.registry import Registry

VIDEO_PROCESSORS: Registry[type[VideoProcessor]] = Registry(
    "video processor",
    {
        "glm4v": "app.media.videos.glm4v:Glm4vVideos",
        "llava_onevision": "app.media.videos.llava_onevision:LlavaOnevisionVideos",
        "qwen2_vl": "app.media.videos.qwen_vl:Qwen2VLVideos",
        "qwen3_vl": "app.media.videos.qwen_vl:Qwen3VLVideos",
    },
)
