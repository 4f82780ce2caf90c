"""The tensors of GGUF files, as gguf.json of the directory that describes them says (app/checkpoints/gguf).

Quantized ones come as the file has them, bytes [..., blocks of a row, bytes of a block]; norms and the rows of queries
and keys are put back into the form that transformers has.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from app.checkpoints.gguf.blocks import BLOCK_TYPES
from app.checkpoints.json_file import read_object
from app.checkpoints.tensors.checkpoint import DataFile, StoredTensor
from app.checkpoints.tensors.leaf import Share
from app.checkpoints.tensors.reader import Reader
from app.checkpoints.tensors.stacked_experts import HALVES, Cuts, unstacked
from app.checkpoints.tensors.tensor_view import computed, pairs_to_halves
from app.checkpoints.weight_files import GGUF_MANIFEST
from app.errors import CheckpointError
from app.loading.load_formats.base import NamedTensors
from app.quantization.base import WeightShares
from app.quantization.gguf import GgufBlocks

# What a file holds of all experts: an expert's parts in it.
_STACKED: dict[str, Cuts] = {
    **{part: {part: lambda x: x} for part in ("gate_proj", "up_proj", "down_proj")},
    "gate_up_proj": HALVES,
}
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
            if "values" in place:
                values = place["values"]
                both = files.setdefault(values["file"], (_map(directory / values["file"]), opened))[0]
                stored = _joined(stored, place["type"], _view(both, file, values), values["type"])
            found |= _of_experts(name, _restored(stored, place))
        return found


def _manifest(directory: Path) -> dict[str, Mapping[str, Any]]:
    try:
        return read_object(directory / GGUF_MANIFEST)
    except CheckpointError as error:
        raise CheckpointError(f"{error.message}; give the GGUF file itself", param="model") from None


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


def _of_experts(name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
    """Each expert's parts of a tensor that holds all of a layer; any other as it is."""
    head, _, part = name.partition(".experts.")
    part, _, leaf = part.partition(".")
    if part not in _STACKED:
        return {name: tensor}
    return dict(unstacked(f"{head}.experts", leaf, tensor, _STACKED[part]))


def _joined(keys: StoredTensor, keys_type: str, stored_values: torch.Tensor, values_type: str) -> StoredTensor:
    """`kv_b_proj` [H (Dn + Dv), R] of its keys' part, [H, R, Dn], and its values' part, [H, Dv, R]."""

    def join(x: torch.Tensor) -> torch.Tensor:
        values = _numbers(values_type, stored_values.to(x.device))
        return torch.cat((_numbers(keys_type, x).transpose(1, 2), values), dim=1).flatten(0, 1)

    return computed(keys, join)


def _numbers(kind: str, stored: torch.Tensor) -> torch.Tensor:
    """Returns what a stored tensor stands for, fp32."""
    if kind in _PLAIN:
        return stored.float()
    rows = stored.flatten(0, 1)
    outputs, inputs = len(rows), rows.shape[1] * BLOCK_TYPES[kind].size
    shares = WeightShares((Share(0, outputs, 0, outputs),), Share(0, inputs, 0, inputs))
    form = GgufBlocks(torch.float32, kind).unpack({"weight": rows}, shares)
    return form.dequantize().view(*stored.shape[:2], inputs)


def _heads_by_keys(x: torch.Tensor, tiled: Mapping[str, int]) -> torch.Tensor:
    """Heads side by side that have the same key, of which one of each key lay after the other."""
    axis, keys, each = tiled["axis"], tiled["keys"], tiled["each"]
    before, heads = torch.split(x, [tiled["first"], x.shape[axis] - tiled["first"]], axis)
    shape = heads.shape
    apart = heads.reshape(*shape[:axis], each, keys, shape[axis] // (each * keys), *shape[axis + 1 :])
    return torch.cat((before, apart.transpose(axis, axis + 1).reshape(shape)), axis)


def _restored(tensor: StoredTensor, place: Mapping[str, Any]) -> StoredTensor:
    if "pairs" in place:
        return pairs_to_halves(tensor, place["pairs"], place["pairs"])
    if "offset" in place:
        return computed(tensor, lambda x: x.float() - place["offset"])
    if "numbers" in place:
        tensor = computed(tensor, lambda x: _numbers(place["type"], x[None])[0])
    if "tiled" in place:
        tensor = computed(tensor, lambda x: _heads_by_keys(x, place["tiled"]))
    return computed(tensor, lambda x: (-x.float()).log()) if "logs" in place else tensor
