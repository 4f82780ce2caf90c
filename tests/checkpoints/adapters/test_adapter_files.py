from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from app.checkpoints.adapters.adapter_files import AdapterFiles, within
from app.errors import CheckpointError, InvalidRequestError, MantaError, UnsupportedError
from tests.adapters import QUERY, pair, write_adapter


def refused(directory: Path, error: type[MantaError], named: str, max_rank: int = 64) -> None:
    with pytest.raises(error, match=named):
        AdapterFiles.read(directory, max_rank)


def test_modules_with_their_ranks_and_factors(tmp_path: Path) -> None:
    tensors = {**pair(), **pair("model.layers.1.mlp.up_proj", rank=2, size_out=112)}
    files = AdapterFiles.read(write_adapter(tmp_path, tensors, rank_pattern={"up_proj": 2}), 64)
    assert {name: (entry.rank, entry.scale) for name, entry in files.modules.items()} == {
        QUERY: (4, 2.0),
        "model.layers.1.mlp.up_proj": (2, 4.0),
    }
    assert files.rank == 4


def test_the_digest_is_of_configuration_and_weights_alone(tmp_path: Path) -> None:
    tensors = pair()
    first = AdapterFiles.read(write_adapter(tmp_path / "a", tensors), 64)
    same = AdapterFiles.read(write_adapter(tmp_path / "b", tensors), 64)
    assert first.digest() == same.digest() == first.digest_of([memoryview(first.content())])
    assert AdapterFiles.read(write_adapter(tmp_path / "c", tensors, lora_alpha=9), 64).digest() != first.digest()
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    assert AdapterFiles.read(write_adapter(tmp_path / "d", other), 64).digest() != first.digest()


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({f"base_model.model.{QUERY}.lora_A.weight": None}, CheckpointError, "lora_A.weight is missing"),
        ({f"base_model.model.{QUERY}.lora_B.weight": None}, CheckpointError, "lora_B.weight is missing"),
        ({"model.embed.weight": torch.zeros(2, 2)}, CheckpointError, "model.embed.weight is no tensor of a LoRA"),
        ({f"base_model.model.{QUERY}.lora_magnitude_vector": torch.zeros(2)}, CheckpointError, "use_dora=False"),
        ({f"base_model.model.{QUERY}.lora_magnitude_vector": torch.zeros(2, 2)}, CheckpointError, "no vector"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)}, CheckpointError, "_B is missing"),
        ({"base_model.model.x.lora_magnitude_vector": torch.zeros(2)}, CheckpointError, "x.lora_A.weight is missing"),
        ({"base_model.model.x.token_adapter.trainable_tokens_delta": torch.zeros(2, 2)}, UnsupportedError, "single"),
        ({f"base_model.model.{QUERY}.lora_B.bias": torch.zeros(2)}, CheckpointError, "lora_bias=False"),
        ({f"base_model.model.{QUERY}.lora_A.weight": torch.zeros(8, 64)}, CheckpointError, "says rank 4"),
        ({f"base_model.model.{QUERY}.lora_A.weight": torch.zeros(4)}, CheckpointError, "no matrix"),
        ({f"base_model.model.{QUERY}.lora_A.weight": torch.zeros(4, 64).int()}, UnsupportedError, "is I32"),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], error: type[MantaError], named: str
) -> None:
    tensors = {name: tensor for name, tensor in {**pair(), **changes}.items() if tensor is not None}
    refused(write_adapter(tmp_path, tensors), error, named)


def test_a_rank_above_the_engines_is_refused(tmp_path: Path) -> None:
    refused(write_adapter(tmp_path), InvalidRequestError, "rank 4, more than max_lora_rank=2", max_rank=2)


def test_pickles_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path)
    weights = directory / "adapter_model.safetensors"
    weights.unlink()
    refused(directory, CheckpointError, "cannot read")
    (directory / "adapter_model.bin").write_bytes(b"\x80\x04")
    refused(directory, UnsupportedError, "is a pickle")
    os.mkfifo(weights)
    refused(directory, CheckpointError, "is no file")


def test_damaged_and_endless_headers_are_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path)
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4])
    refused(directory, CheckpointError, "not complete")
    with weights.open("wb") as file:  # as long as a header of a billion tensors would be
        file.write((60 << 30).to_bytes(8, "little"))
        file.truncate(31 << 30)
    refused(directory, CheckpointError, "a header of")
    many = {f"base_model.model.{index}.lora_A.weight": torch.zeros(4, 1) for index in range(3)}
    save_file(many, weights)
    refused(directory, CheckpointError, "lora_B.weight is missing")
    save_file({}, weights)
    refused(directory, CheckpointError, "holds 0 tensors")


def test_a_configuration_that_is_none_is_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path)
    config = directory / "adapter_config.json"
    for content in ("[]", "{", json.dumps({"peft_type": "LORA"}) + " " * (2 << 20)):
        config.write_text(content)
        refused(directory, CheckpointError, "adapter_config.json")


def test_only_directories_under_allowed_roots(tmp_path: Path) -> None:
    root = tmp_path / "root"
    inside, outside = write_adapter(root / "one"), write_adapter(tmp_path / "other")
    assert within(str(inside), [root]) == inside.resolve()
    (root / "link").symlink_to(outside)
    half = write_adapter(root / "half")
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in (str(outside), f"{root}/../other", f"{root}/link", str(half), "one", f"{root}\0", "/" * 5000):
        with pytest.raises(InvalidRequestError, match="lora_path"):
            within(path, [root])
    with pytest.raises(InvalidRequestError, match="lora_path"):
        within(str(inside), [])
