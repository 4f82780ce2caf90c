"""Finds the files of a model directory that hold its weights, and their format: no torch (I8)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from app.checkpoints.json_file import read_object
from app.errors import CheckpointError, ConfigError

# Files of a format that holds tensors by name: one file, or an index that lists several.
NAMED_FILES = {
    "safetensors": ("model.safetensors", "model.safetensors.index.json"),
    "pt": ("pytorch_model.bin", "pytorch_model.bin.index.json"),
}
MOST_NAME_CHARS = 1 << 10
_LAYER = re.compile(r"[^\d]*?(?<!_groups)\.(\d{1,9})\.")  # a group's layers are gone through more than once (ALBERT)
SHARDED_MANIFEST = "sharded_state.json"
GGUF_MANIFEST = "gguf.json"  # of a directory that describes a GGUF file (app/checkpoints/gguf)


def checked_name(name: str) -> str:
    """The name of a tensor, in a file of any format; ValueError where it is longer than any name is, or no text that
    could be shown."""
    if not name.isprintable():
        raise ValueError(f"a tensor's name holds what is no text: {name!a:.80}")
    if len(name) > MOST_NAME_CHARS:
        raise ValueError(f"a tensor's name has {len(name)} characters ({name:.40}...); at most {MOST_NAME_CHARS}")
    return name


def check_layers(directory: Path, names: Iterable[str], num_layers: int) -> None:
    """CheckpointError where tensors of these names are of fewer layers than config.json says: building a model of
    thousands takes minutes. Names begin with that of the layers and its number; those without a number tell nothing."""
    numbers = [int(found[1]) for name in names if (found := _LAYER.match(name))]
    if numbers and max(numbers) + 1 < num_layers:
        what = (
            f"the number of layers is {num_layers}, but the checkpoint lacks layer {max(numbers) + 1} and what follows"
        )
        raise CheckpointError(f"{directory}/config.json is not usable: {what}", param="model")


def format_of(directory: Path, load_format: str) -> str:
    """Returns what `auto` means here; any other `load_format` as it is. CheckpointError where there are no weights,
    ConfigError where the model is no GGUF file although `load_format` says so."""
    if load_format == "gguf" and not (directory / GGUF_MANIFEST).is_file():
        raise ConfigError(
            f"load_format=gguf: {directory} is a model directory: give the .gguf file itself as the model, or leave "
            "load_format out",
            param="load_format",
        )
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
        files: Any = read_object(index)["weight_map"]
        if not files or not all(isinstance(file, str) and Path(file).name == file for file in files.values()):
            raise ValueError("weight_map must name a file of the same directory for each tensor")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
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
    """Returns what to say where the weights are there, but in another format."""
    try:
        return f"; it has weights for load_format={format_of(directory, 'auto')}"
    except CheckpointError:
        return ""
