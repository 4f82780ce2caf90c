"""The head of a GGUF file: what the `gguf` package wrote is read; damage is named."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from array import array
from pathlib import Path

import gguf
import numpy as np
import pytest

from app.checkpoints.gguf.header import GgufHeader
from app.errors import CheckpointError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "é", "▁b"])
    writer.add_token_types([1, 3, 6])
    writer.add_add_bos_token(True)
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    raw = gguf.quantize(np.ones((5, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_the_package_wrote_is_read(file: Path) -> None:
    header = GgufHeader.read(file)
    judge = gguf.GGUFReader(file)
    for name, field in judge.fields.items():
        if not name.startswith("GGUF."):
            found, expected = header.metadata[name], field.contents()
            assert (list(found) if isinstance(found, array) else found) == expected, name
    assert list(header.tensors) == [tensor.name for tensor in judge.tensors]
    for tensor in judge.tensors:
        found = header.tensors[tensor.name]
        assert (found.begin, found.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.block.name == tensor.tensor_type.name


def test_a_file_that_ends_anywhere_is_refused(file: Path) -> None:
    whole = file.read_bytes()
    for length in (0, 3, 10, 24, 40, 100, 200, len(whole) - 64):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cannot read .*model\.gguf"):
            GgufHeader.read(file)


def test_random_damage_is_a_checkpoint_error_or_harmless(file: Path) -> None:
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(0, 420, 3):
            damaged[place] = rng.integers(0, 256)
        file.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            GgufHeader.read(file)


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 9), r"GGUF version 9; known: 2, 3"),
        (8, struct.pack("<Q", 1 << 60), "ends in its header"),
    ],
)
def test_no_gguf_file(file: Path, at: int, new: bytes, message: str) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + len(new)] = new
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufHeader.read(file)


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (4 + 16 + 4, struct.pack("<Q", 1), r"plain begins at byte \d+, where no F32 can be read"),
        (4, struct.pack("<Q", 0), r"plain has shape \[3, 0\]: it is empty"),
    ],
)
def test_a_tensor_that_lies_nowhere_is_named(file: Path, at: int, new: bytes, message: str) -> None:
    content = bytearray(file.read_bytes())
    at += content.index(b"plain") + len("plain")
    content[at : at + len(new)] = new
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufHeader.read(file)


def test_arrays_of_numbers_stay_packed(tmp_path: Path) -> None:
    """A list would be ten times as large as what it was read from."""
    path, count = tmp_path / "model.gguf", 1 << 16
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<IIQ", 9, 11, count)
    path.write_bytes(head + struct.pack("<q", 1 << 40) * count)
    tracemalloc.start()
    try:
        found = GgufHeader.read(path).metadata["x"]
        assert tracemalloc.get_traced_memory()[1] < 8 * count * 3
    finally:
        tracemalloc.stop()
    assert set(found) == {1 << 40}


def test_a_type_that_is_not_read_is_named(file: Path) -> None:
    content = file.read_bytes()
    at = content.index(b"packed") + len("packed") + 4 + 16
    file.write_bytes(content[:at] + struct.pack("<I", 16) + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"packed is stored as IQ2_XXS, which is not supported; known: BF16"):
        GgufHeader.read(file)


def test_tensors_that_share_bytes_are_named(file: Path) -> None:
    """A small file could stand for any amount of memory."""
    content = bytearray(file.read_bytes())
    at = content.index(b"packed") + len("packed") + 4 + 16 + 4
    content[at : at + 8] = struct.pack("<Q", 32)  # `plain` has 48 bytes from 0 on
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"packed begins at byte \d+, within plain, which ends at \d+"):
        GgufHeader.read(file)


def test_a_name_longer_than_any_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    name = b"blk." + b"9" * 5000 + b".attn_norm.weight"
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 4, 0, 0)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + bytes(64))
    with pytest.raises(CheckpointError, match=r"a tensor's name has 5021 characters \(blk\.999"):
        GgufHeader.read(file)
