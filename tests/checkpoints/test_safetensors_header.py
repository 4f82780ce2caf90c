"""Headers are read as the safetensors library writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from app.checkpoints.safetensors_header import ITEM_BYTES, SafetensorsHeader
from app.checkpoints.tensors.reader import Reader
from app.errors import CheckpointError
from app.loading.load_formats.safetensors import DTYPES, open_files

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


def entry(shape: object = (4,), offsets: object = (0, 16), dtype: object = "F32") -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (f'{{"a": {entry((4, 0, 1 << 63), (0, 0))}}}', "must be whole numbers"),
        (f'{{"a": {entry((1 << 31, 1 << 31, 1 << 31, 0), (0, 0))}}}', r"a is F32 \[2147483648, .* but has 0 bytes"),
        (f'{{"a": {entry((10**4000,) * 30)}}}', r"must be whole numbers'\)\)$"),
        (f'{{"a": {entry((1,) * 33 + (4,))}}}', r"must be a list of at most 32'\)\)$"),
        (f'{{"a": {entry()}, "a": {entry()}}}', "a name stands twice"),
        ('{"a": {"dtype": "F32", "dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}', "a name stands twice"),
        (f'{{"__metadata__": [], "a": {entry()}}}', "__metadata__ must hold texts by name"),
        (f'{{"\\ud800": {entry()}}}', r"a tensor's name holds what is no text: '\\ud800'"),
        (f'{{"a\\u001b[31m": {entry()}}}', r"a tensor's name holds what is no text: 'a\\x1b"),
        (f'{{"a": {entry((2,), (0, 8))}, "b": {entry((3,), (4, 16))}}}', "b begins at byte"),
        (f'{{"a": {entry((2,), (0, 8))}, "b": {entry((1,), (12, 16))}}}', "b begins at byte"),
        (f'{{"a": {entry((3,), (0, 12))}}}', "4 bytes follow the last tensor"),
        (f'{{"a": {entry(dtype="x" * 9999)}}}', "a has the unknown type 'xxx"),
        (f'{{"a": {entry((True, 4), (False, 16))}}}', "must be whole numbers"),
    ],
)
def test_a_hostile_header_is_refused_in_a_line(header: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsHeader.read(file)
    assert len(caught.value.message) < 400 + len(str(tmp_path))
    caught.value.message.encode()


def test_random_damage_is_judged_as_the_library_judges_it(tmp_path: Path) -> None:
    """But for names twice in equal entries, which it takes."""
    file, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    whole = f'{{"a": {entry((2,), (0, 8))}, "b": {entry((1, 2), (8, 16))}}}'.encode()
    for _ in range(400):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 2):
            damaged[place] = int(rng.choice(list(b'0123456789-+eE.,:[]{}"abF ')))
        file.write_bytes(len(damaged).to_bytes(8, "little") + damaged + bytes(16))
        assert _is_refused(lambda: open_files([file], Reader())) == _is_refused(lambda: load_file(file)), damaged


def _is_refused(read: Callable[[], object]) -> bool:
    try:
        read()
    except (CheckpointError, SafetensorError):
        return True
    return False
