"""Each way in which a checkpoint is damaged or incomplete is an error that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.checkpoints.tensors.checkpoint import DataFile
from app.errors import CheckpointError
from tests.loading.load_formats.formats import as_pt, fill
from tests.tiny_models import tiny_model

INDEX = "model.safetensors.index.json"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A checkpoint of several safetensors files."""
    return Path(shutil.copytree(tiny_model("llama", max_shard_size="60KB"), tmp_path / "model"))


def cut(size: int) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(file.read_bytes()[:size])


def with_header(edit: Callable[[dict[str, dict[str, list[int]]]], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        edit(header)
        written = json.dumps(header).encode()
        file.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + length :])

    return damage


def first(header: dict[str, dict[str, list[int]]]) -> dict[str, list[int]]:
    return header[min(name for name in header if name != "__metadata__")]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (cut(0), "it is no safetensors file, or damaged"),
    "cut within the header": (cut(100), r"a header of \d+ bytes in 100"),
    "cut within the data": (lambda f: cut(f.stat().st_size - 1)(f), "the copy or download is not complete"),
    "something behind the data": (lambda f: f.write_bytes(f.read_bytes() + b"more"), "4 bytes follow the last tensor"),
    "a page of the web": (lambda f: f.write_text("<html>" + 99 * "not found"), "it is no safetensors file, or damaged"),
    "a pointer of Git LFS": (
        lambda f: f.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"),
        "it is no safetensors file, or damaged",
    ),
    "a header that is no JSON": (
        lambda f: f.write_bytes(f.read_bytes()[:8] + b"!" + f.read_bytes()[9:]), "its header is no JSON",
    ),
    "a list as header": (lambda f: f.write_bytes((2).to_bytes(8, "little") + b"[]"), "not as the format has it"),
    "an unknown type": (with_header(lambda h: first(h).update(dtype="F4")), "has the unknown type 'F4'"),
    "a shape of other bytes": (with_header(lambda h: first(h)["shape"].append(2)), r"but has \d+ bytes"),
    "a size beyond all numbers": (
        with_header(lambda h: first(h).update(shape=[float("inf")])),  # type: ignore[list-item]
        "not as the format has it",
    ),
    "a shape of fractions": (
        with_header(lambda h: first(h).update(shape=[float(n) for n in first(h)["shape"]])),  # type: ignore[misc]
        "must be whole numbers",
    ),
    "remarks in a list": (with_header(lambda h: h.update(__metadata__=["pt"])), "must hold texts by name"),  # type: ignore[call-overload]
    "tensors that overlap": (
        with_header(lambda h: first(h).update(data_offsets=[o + 4 for o in first(h)["data_offsets"]])),
        "not behind the tensor before it",
    ),
    "removed": (Path.unlink, "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_shard_is_named(shards: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    victim = sorted(shards.glob("*.safetensors"))[1]
    damage(victim)
    with pytest.raises(CheckpointError, match=message) as caught:
        fill(shards)
    assert str(victim) in caught.value.message
    assert caught.value.param == "model"


def test_a_tensor_in_another_shard_than_indexed_is_named(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    moved, other = "model.norm.weight", sorted(set(index["weight_map"].values()))[0]
    here = index["weight_map"][moved]
    assert here != other
    (shards / INDEX).write_text(json.dumps({**index, "weight_map": {**index["weight_map"], moved: other}}))
    with pytest.raises(CheckpointError, match=rf"{moved} is in .*{here}, but .* places it in {other}"):
        fill(shards)


def test_a_shard_without_an_indexed_tensor_is_named(shards: Path) -> None:
    here = shards / json.loads((shards / INDEX).read_text())["weight_map"]["model.norm.weight"]
    tensors = load_file(here)
    del tensors["model.norm.weight"]
    save_file(tensors, here)
    with pytest.raises(CheckpointError, match=rf"{here.name} lacks model\.norm\.weight"):
        fill(shards)


def test_an_index_that_leaves_its_directory_is_refused(shards: Path) -> None:
    (shards / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match=INDEX):
        fill(shards)


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(10))
    with pytest.raises(CheckpointError, match=f"cannot read {file}: it became shorter"):
        DataFile(file).read_into(torch.empty(4, dtype=torch.float32), 0)


PT_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (cut(0), "cannot read"),
    "cut": (lambda f: cut(f.stat().st_size // 2)(f), "cannot read"),
    "text": (lambda f: f.write_text("hello"), "cannot read"),
    "code": (lambda f: torch.save({"model.norm.weight": print}, f), "could run code"),
    "no tensors": (lambda f: torch.save({"epoch": 3}, f), "epoch is a int, not a tensor"),
    "no names": (lambda f: torch.save([torch.zeros(2)], f), "holds a list"),
    "removed": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("name", PT_DAMAGES)
def test_a_damaged_bin_file_is_named(tmp_path: Path, name: str) -> None:
    damage, message = PT_DAMAGES[name]
    directory = as_pt(tiny_model("llama"), tmp_path / "model", files=2)
    victim = sorted(directory.glob("*.bin"))[1]
    damage(victim)
    with pytest.raises(CheckpointError, match=message) as caught:
        fill(directory)
    assert str(victim) in caught.value.message


def test_weights_of_another_format_are_pointed_out(tmp_path: Path) -> None:
    directory = as_pt(tiny_model("llama"), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor .*load_format=pt"):
        fill(directory, load_format="safetensors")
