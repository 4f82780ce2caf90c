"""Tensors out of the bytes of a safetensors file that has been read whole."""

from __future__ import annotations

import torch

from app.checkpoints.safetensors_header import TensorEntry

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def entry_tensor(entry: TensorEntry, content: bytearray) -> torch.Tensor:
    """The tensor that lies at an entry's place; nothing is copied where it is aligned."""
    dtype = _TYPES[entry.dtype]
    count = (entry.end - entry.begin) // dtype.itemsize
    data = torch.frombuffer(memoryview(content)[entry.begin : entry.end], dtype=torch.uint8)
    if data.data_ptr() % dtype.itemsize:  # a header of odd length
        data = data.clone()
    return data.view(dtype)[:count].view(entry.shape)
