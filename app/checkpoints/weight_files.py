"""Which files of a model directory hold its weights, and in what format: no torch (I8)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.errors import CheckpointError

# Files of a format that holds tensors by name: one file, or an index that lists several.
NAMED_FILES = {
    "safetensors": ("model.safetensors", "model.safetensors.index.json"),
    "pt": ("pytorch_model.bin", "pytorch_model.bin.index.json"),
}
SHARDED_MANIFEST = "sharded_state.json"
GGUF_MANIFEST = "gguf.json"  # of a directory that describes a GGUF file (app/engine/gguf)


def format_of(directory: Path, load_format: str) -> str:
    """What `auto` means here; any other `load_format` as it is. CheckpointError where there are no weights."""
    if load_format != "auto":
        return load_format
    if (directory / SHARDED_MANIFEST).is_file():
        return "sharded_state"
    if (directory / GGUF_MANIFEST).is_file():
        return "gguf"
    for name, files in NAMED_FILES.items():
        if any((directory / file).is_file() for file in files):
            return name
    known = [file for files in NAMED_FILES.values() for file in files]
    raise CheckpointError(
        f"{directory} holds no weights: none of {', '.join([*known, SHARDED_MANIFEST])}", param="model"
    )


def weight_files(directory: Path, kind: str) -> list[Path]:
    """The files of the format `kind` ("safetensors" or "pt"); CheckpointError names what is missing or unusable."""
    single, index = NAMED_FILES[kind]
    if not (directory / index).is_file():
        if not (directory / single).is_file():
            raise CheckpointError(f"{directory} holds neither {single} nor {index}{_other(directory)}", param="model")
        return [directory / single]
    names = sorted(set(weight_map(directory / index).values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{directory / missing[0]} is missing{more}, although {index} lists it", param="model")
    return [directory / name for name in names]


def weight_map(index: Path) -> Mapping[str, str]:
    """Name of a tensor -> name of its file beside `index`; CheckpointError where that is not what it holds."""
    try:
        files: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not files or not all(isinstance(file, str) and Path(file).name == file for file in files.values()):
            raise ValueError("weight_map must name a file of the same directory for each tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {index}: {error!r}", param="model") from None
    assert isinstance(files, dict)
    return files


def check_map(index: Path, holds: Mapping[str, Path]) -> None:
    """CheckpointError names the first tensor that lies in another file than `index` says; `holds`: where each does."""
    if not index.is_file():
        return
    for name, file in weight_map(index).items():
        found = holds.get(name)
        if found is None:
            raise CheckpointError(f"{index.parent / file} lacks {name}, which {index.name} places there", param="model")
        if found.name != file:
            raise CheckpointError(f"{name} is in {found}, but {index.name} places it in {file}", param="model")


def _other(directory: Path) -> str:
    """What to say where the weights are there, but in another format."""
    try:
        return f"; it has weights for load_format={format_of(directory, 'auto')}"
    except CheckpointError:
        return ""
