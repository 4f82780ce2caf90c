"""Processors of pictures, a family a file: the table."""

from __future__ import annotations

from app.media.processors.base import Processor
from app.registry import Registry

PROCESSORS: Registry[type[Processor]] = Registry(
    "media processor",
    {
        "qwen_vl": "app.media.processors.qwen_vl:QwenVLProcessor",
    },
)
