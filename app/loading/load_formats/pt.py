"""PyTorch's own files: `pytorch_model.bin`, or those that `pytorch_model.bin.index.json` lists.

Only tensors are unpickled (`weights_only`): such a file cannot run code.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.reader import Reader
from app.checkpoints.weight_files import NAMED_FILES, check_map, checked_name, weight_files
from app.errors import CheckpointError
from app.loading.load_formats.base import NamedTensors


class Pt(NamedTensors):
    """Mapped, so that a rank reads its shares only; files older than PyTorch 1.6 are read whole."""

    def tensors(self, directory: Path, reader: Reader) -> dict[str, StoredTensor]:
        """All tensors of a directory, unread. CheckpointError names an unusable file."""
        tensors: dict[str, StoredTensor] = {}
        for file in weight_files(directory, "pt"):
            found = open_file(file, reader)
            if both := sorted(found.keys() & tensors.keys()):
                raise CheckpointError(f"{both[0]} is both in {tensors[both[0]].file} and {file}", param="model")
            tensors |= found
        check_map(directory / NAMED_FILES["pt"][1], {name: tensor.file for name, tensor in tensors.items()})
        return tensors


def open_file(file: Path, reader: Reader) -> dict[str, StoredTensor]:
    """The tensors of a file; CheckpointError names what is none."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in _named(file).items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{file}: {name} is a {type(tensor).__name__}, not a tensor", param="model")
        tensors[name] = StoredTensor(name, file, tensor.detach(), tensor.data_ptr(), reader)
    return tensors


def _named(file: Path) -> dict[str, Any]:
    loaded = _load(file)
    try:
        return {checked_name(str(name)): tensor for name, tensor in loaded.items()}
    except ValueError as error:
        raise CheckpointError(f"cannot read {file}: {error}", param="model") from None


def _load(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            is_zip = opened.read(4) == b"PK\x03\x04"  # what PyTorch 1.6 and later write, and only that can be mapped
        loaded = torch.load(file, map_location="cpu", mmap=is_zip, weights_only=True)
    except UnpicklingError:
        raise CheckpointError(
            f"{file} holds more than tensors, and what it holds could run code: it is not read. Save the weights as "
            "safetensors",
            param="model",
        ) from None
    except Exception as error:  # of what is no such file, unpickling raises anything
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"cannot read {file}: {type(error).__name__} {reason}".rstrip(), param="model") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file} holds a {type(loaded).__name__}, not tensors by name", param="model")
    return loaded
