"""The tensors of GGUF files, as gguf.json of the directory that describes them says (app/engine/gguf).

Quantized ones come as the file has them, bytes [..., blocks of a row, bytes of a block]; norms and the rows of queries
and keys are put back into the form that transformers has.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from app.engine.gguf.blocks import BLOCK_TYPES
from app.engine.models.checkpoint import DataFile, StoredTensor
from app.engine.models.load_formats.base import NamedTensors
from app.engine.models.reader import Reader
from app.engine.models.tensor_view import computed, pairs_to_halves
from app.engine.weight_files import GGUF_MANIFEST
from app.errors import CheckpointError

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Gguf(NamedTensors):
    """Read by offset, straight into the parameters where they are as the file has them."""

    def tensors(self, directory: Path, reader: Reader) -> dict[str, StoredTensor]:
        """All tensors, unread. CheckpointError names an unusable file."""
        files: dict[str, tuple[torch.Tensor, DataFile]] = {}
        found: dict[str, StoredTensor] = {}
        for name, place in _manifest(directory).items():
            file = directory / place["file"]
            if place["file"] not in files:
                files[place["file"]] = (_map(file), DataFile(file))
            data, opened = files[place["file"]]
            stored = StoredTensor(name, file, _view(data, file, place), place["begin"], reader, opened)
            found[name] = _restored(stored, place)
        return found


def _manifest(directory: Path) -> dict[str, Mapping[str, Any]]:
    file = directory / GGUF_MANIFEST
    try:
        places: dict[str, Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; give the GGUF file itself", param="model") from None
    return places


def _map(file: Path) -> torch.Tensor:
    try:
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # PyTorch takes none that is read-only
    except OSError as error:
        raise CheckpointError(f"cannot read {file.resolve()}: {error.strerror}", param="model") from None
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _view(data: torch.Tensor, file: Path, place: Mapping[str, Any]) -> torch.Tensor:
    block = BLOCK_TYPES[place["type"]]
    *rows, columns = place["shape"]
    shape = [*rows, columns // block.size, block.num_bytes]
    if place["begin"] + prod(shape) > len(data):
        raise CheckpointError(f"{file.resolve()} became shorter since it was described", param="model")
    raw = data[place["begin"] : place["begin"] + prod(shape)]
    plain = _PLAIN.get(block.name)
    return raw.view(shape) if plain is None else raw.view(plain).view(place["shape"])


def _restored(tensor: StoredTensor, place: Mapping[str, Any]) -> StoredTensor:
    if "pairs" in place:
        return pairs_to_halves(tensor, place["pairs"], place["pairs"])
    if "offset" in place:
        return computed(tensor, lambda x: x.float() - place["offset"])
    return tensor
