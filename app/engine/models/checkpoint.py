"""A directory of safetensors files as one table of tensors, read slice by slice.

A single `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from app.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(slots=True, frozen=True)
class SlicedTensor:
    """One tensor in a file; only what is asked for is read."""

    name: str
    file: Path
    handle: Any  # safetensors' lazy slice

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.handle.get_shape())

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Read `length` entries from `start` along `dim`."""
        return self._read((slice(None),) * dim + (slice(start, start + length),))

    def whole(self) -> torch.Tensor:
        """Read all of it, also where it has no dimensions."""
        return self._read(...)

    def _read(self, index: Any) -> torch.Tensor:
        try:
            part: torch.Tensor = self.handle[index]
        except SafetensorError as error:
            raise CheckpointError(f"cannot read {self.name} from {self.file}: {error}", param="model") from error
        return part


class Checkpoint:
    """All tensors of a model directory by name. CheckpointError names an unusable file."""

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, SlicedTensor] = {}
        for file in _files(directory):
            self._open(file)

    def _open(self, file: Path) -> None:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, although {INDEX} lists it", param="model")
        try:
            # The handle keeps the file mapped for as long as one of its slices lives.
            handle: Any = safe_open(file, framework="pt", device="cpu")
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in self.tensors:
                    raise CheckpointError(f"{name} is both in {self.tensors[name].file} and {file}", param="model")
                self.tensors[name] = SlicedTensor(name, file, handle.get_slice(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {file}: {error}", param="model") from error


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise CheckpointError(f"{directory} holds neither {SINGLE} nor {INDEX}", param="model")
        return [directory / SINGLE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, json.JSONDecodeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"cannot read {index}: {error!r}", param="model") from error
    return [directory / name for name in sorted(names)]
