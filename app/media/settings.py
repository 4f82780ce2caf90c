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
    older = read_object(directory / "preprocessor_config.json", optional=True)
    newer = read_object(directory / "processor_config.json", optional=True)
    own = newer.pop(part, {})
    if not isinstance(own, Mapping):
        raise CheckpointError(f"{directory}/processor_config.json: {part} is no object", param="model")
    if part == "video_processor":  # of which one file says everything; pictures' settings stand in for them
        own = own or read_object(directory / "video_preprocessor_config.json", optional=True) or older
        return {name: value for name, value in own.items() if value is not None}
    return {name: value for name, value in {**newer, **older, **own}.items() if value is not None}
