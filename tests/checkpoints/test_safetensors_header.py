"""Headers are read as the safetensors library writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from app.engine.models.load_formats.safetensors import DTYPES, open_files
from app.engine.models.reader import Reader
from app.engine.safetensors_header import ITEM_BYTES, SafetensorsHeader
from app.errors import CheckpointError

# Types that the library writes and PyTorch has.
TENSORS = {
    **{str(dtype): torch.arange(6).to(dtype).view(2, 3) for dtype in (torch.float32, torch.bfloat16, torch.int64)},
    "fp8": torch.arange(5.0).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 7),
}


def test_every_type_and_shape_is_found_where_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file, {"format": "pt"})
    header = SafetensorsHeader.read(file)
    assert header.metadata == {"format": "pt"}
    assert header.tensors.keys() == TENSORS.keys()
    read = open_files([file], Reader())
    with safe_open(file, framework="pt") as judge:
        for name, entry in header.tensors.items():
            expected = judge.get_tensor(name)
            assert entry.shape == tuple(expected.shape)
            assert entry.end - entry.begin == expected.nbytes
            whole = read[name].whole()
            assert (whole.shape, whole.dtype) == (expected.shape, expected.dtype)
            assert torch.equal(whole.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def test_types_of_the_header_and_of_torch_agree() -> None:
    assert DTYPES.keys() == ITEM_BYTES.keys()
    assert all(DTYPES[name].itemsize == size for name, size in ITEM_BYTES.items())


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"cannot read {tmp_path}"):
        SafetensorsHeader.read(tmp_path)


def test_an_empty_tensor_may_be_named_behind_one_that_begins_where_it_does(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"one": one, "none": {**one, "shape": [0], "data_offsets": [0, 0]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with safe_open(file, framework="pt") as judge:
        assert judge.get_tensor("none").shape == (0,)
    assert list(SafetensorsHeader.read(file).tensors) == ["none", "one"]
