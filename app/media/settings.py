"""Reads the settings of the image or video processor, or feature extractor, that a checkpoint was trained with, from
its own files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from app.checkpoints.json_file import read_object
from app.errors import CheckpointError

Part = Literal["image_processor", "video_processor", "feature_extractor"]


def read_settings(directory: Path, part: Part = "image_processor") -> Mapping[str, Any]:
    """The processor's settings: of processor_config.json, as newer files have them, over preprocessor_config.json.

    What the newer file says of prompts (tokens of a picture, its patches) is beside what it says of the pixels.
    CheckpointError names an unreadable file.
    """
    older, newer = (
        read_object(directory / f"{name}_config.json", optional=True) for name in ("preprocessor", "processor")
    )
    older |= _taken(older, "media_proc_cfg", f"{directory}/preprocessor_config.json")  # Kimi's
    own = _taken(newer, part, f"{directory}/processor_config.json")
    if part == "video_processor":  # of which one file says everything; pictures' settings stand in for them
        own = own or read_object(directory / "video_preprocessor_config.json", optional=True) or older
        return {name: value for name, value in own.items() if value is not None}
    return {name: value for name, value in {**newer, **older, **own}.items() if value is not None}


def _taken(content: dict[str, Any], name: str, file: str) -> dict[str, Any]:
    """The object of that name, which the content loses; {} where there is none."""
    found = content.pop(name, {})
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: {name} is no object", param="model")
    return found
