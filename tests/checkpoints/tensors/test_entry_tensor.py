"""Tensors of a file's bytes, aligned and not; safetensors' own reader is the judge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from app.checkpoints.safetensors_header import SafetensorsHeader
from app.checkpoints.tensors.entry_tensor import entry_tensor, read_entry
from app.errors import CheckpointError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1])
def test_tensors_of_bytes(tmp_path: Path, dtype: torch.dtype, shift: int) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype)}, file)
    header = SafetensorsHeader.read(file, 1 << 20)
    content = bytearray(shift) + file.read_bytes()
    for name, tensor in load(file.read_bytes()).items():
        entry = header.tensors[name]
        moved = type(entry)(**{field: getattr(entry, field) for field in entry.__slots__})
        if shift:
            moved = type(entry)(entry.dtype, entry.shape, entry.begin + shift, entry.end + shift)
        torch.testing.assert_close(entry_tensor(moved, content), tensor, rtol=0, atol=0)
        torch.testing.assert_close(read_entry(file, entry), tensor, rtol=0, atol=0)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(8)}, file)
    entry = SafetensorsHeader.read(file, 1 << 20).tensors["a"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="became shorter"):
        read_entry(file, entry)
