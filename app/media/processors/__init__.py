"""Processors of pictures, a family a file: the table."""

from __future__ import annotations

from app.media.processors.base import Processor
from app.registry import Registry

PROCESSORS: Registry[type[Processor]] = Registry(
    "media processor",
    {
        "clip": "app.media.processors.clip:ClipProcessor",
        "gemma3": "app.media.processors.gemma3:Gemma3Processor",
        "idefics3": "app.media.processors.idefics3:Idefics3Processor",
        "internvl": "app.media.processors.internvl:InternVLProcessor",
        "pixtral": "app.media.processors.pixtral:PixtralProcessor",
        "qwen_vl": "app.media.processors.qwen_vl:QwenVLProcessor",
    },
)
