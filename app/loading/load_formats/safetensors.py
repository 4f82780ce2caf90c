"""safetensors: `model.safetensors`, or the files that `model.safetensors.index.json` lists."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path

import torch

from app.checkpoints.safetensors_header import SafetensorsHeader, TensorEntry
from app.checkpoints.tensors.checkpoint import DataFile, StoredTensor
from app.checkpoints.tensors.reader import Reader
from app.checkpoints.weight_files import NAMED_FILES, check_map, weight_files
from app.errors import CheckpointError
from app.loading.load_formats.base import NamedTensors

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class Safetensors(NamedTensors):
    """Read by offset, straight into the parameters."""

    def tensors(self, directory: Path, reader: Reader) -> dict[str, StoredTensor]:
        """All tensors of a directory, unread. CheckpointError names an unusable file."""
        tensors = open_files(weight_files(directory, "safetensors"), reader)
        check_map(directory / NAMED_FILES["safetensors"][1], {name: tensor.file for name, tensor in tensors.items()})
        return tensors


def open_files(files: Iterable[Path], reader: Reader) -> dict[str, StoredTensor]:
    """The tensors of some files, no two of one name."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        header, data = SafetensorsHeader.read(file), DataFile(file)
        mapped = _map(file)
        for name, entry in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{name} is both in {tensors[name].file} and {file}", param="model")
            tensors[name] = StoredTensor(name, file, _view(mapped, entry), entry.begin, reader, data)
    return tensors


def _map(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # PyTorch takes none that is read-only


def _view(mapped: mmap.mmap, entry: TensorEntry) -> torch.Tensor:
    dtype = DTYPES[entry.dtype]
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=dtype)
    count = (entry.end - entry.begin) // dtype.itemsize
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)
