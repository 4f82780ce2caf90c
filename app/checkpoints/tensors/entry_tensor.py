"""Tensors out of the bytes of a safetensors file that has been read whole, or out of the file itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from app.checkpoints.safetensors_header import TensorEntry
from app.errors import CheckpointError

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def entry_tensor(entry: TensorEntry, content: bytearray) -> torch.Tensor:
    """The tensor that lies at an entry's place; nothing is copied where it is aligned."""
    dtype = _TYPES[entry.dtype]
    count = (entry.end - entry.begin) // dtype.itemsize
    data = torch.frombuffer(memoryview(content)[entry.begin : entry.end], dtype=torch.uint8)
    if data.data_ptr() % dtype.itemsize:  # a header of odd length
        data = data.clone()
    return data.view(dtype)[:count].view(entry.shape)


def read_entry(file: Path, entry: TensorEntry) -> torch.Tensor:
    """The tensor of an entry, of whose file nothing else is read."""
    with file.open("rb", buffering=0) as opened:
        opened.seek(entry.begin)
        content = bytearray(opened.read(entry.end - entry.begin))
    if len(content) < entry.end - entry.begin:
        raise CheckpointError(f"{file} became shorter while it was read", param="model")
    return entry_tensor(replace(entry, begin=0, end=len(content)), content)
