"""An adapter's tensors find their places in the model, or are refused by name. That the places are right, PEFT says in
tests/worker/lora."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.errors import MantaError
from app.layers.linear import Linear
from app.loading.adapters import AdapterReader, LayerPair, are_numbers
from tests.adapters import QUERY, pair, write_adapter
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver


def reader(family: str = "llama", **changes: Any) -> AdapterReader:
    worker = Driver(str(tiny_model(family, **changes)), num_blocks=8).worker
    assert worker._parts is not None
    model = worker._parts.model
    layers = [module for module in model.modules() if isinstance(module, Linear) and module.takes_delta]
    return AdapterReader(model, layers, frozenset({"model.layers.9.mlp.up_proj.weight"}))


def read(own: AdapterReader, directory: Path, tensors: dict[str, torch.Tensor]) -> list[LayerPair]:
    files = AdapterFiles.read(write_adapter(directory, tensors), 64)
    own.check(files)
    return own.pairs(files, files.content())


def test_parts_of_a_fused_layer(tmp_path: Path) -> None:
    own, tensors = reader(), {**pair(), **pair("model.layers.0.self_attn.v_proj", size_out=32)}
    found = read(own, tmp_path, tensors)
    assert [one.part for one in found] == ["q_proj", "v_proj"]
    assert found[0].layer is found[1].layer
    for one, name in zip(found, ("q_proj", "v_proj"), strict=True):
        prefix = f"base_model.model.model.layers.0.self_attn.{name}.lora_"
        first, second = one.first.new_zeros(3, one.first.shape[1]), one.second.new_zeros(len(one.second), 1)
        one.first_into(first, slice(0, 3))
        one.second_into(second, slice(2, 3))
        assert torch.equal(first, tensors[f"{prefix}A.weight"][:3])
        assert torch.equal(second, tensors[f"{prefix}B.weight"][:, 2:3] * 2), "the factor is in the second"


def test_layers_of_other_stages_are_left_to_them(tmp_path: Path) -> None:
    assert read(reader(), tmp_path, pair("model.layers.9.mlp.up_proj", size_out=112)) == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (pair("model.layers.7.self_attn.q_proj"), "model.layers.7.self_attn.q_proj: the model has no such layer"),
        (pair("lm_head", size_out=331), "lm_head: LoRA on the output head: start the engine with lora_extras"),
        (pair(size_in=32), "for 32 inputs and 64 outputs; the layer has 64 and 64"),
        (pair(size_out=63), "for 64 inputs and 63 outputs"),
    ],
)
def test_what_the_model_has_no_place_for_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(MantaError, match=message):
        read(reader(), tmp_path, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("side", "number"), [("A", torch.nan), ("A", -torch.inf), ("B", torch.inf), ("B", 4e4)])
def test_numbers_that_the_models_type_does_not_hold_are_refused(
    tmp_path: Path, dtype: torch.dtype, side: str, number: float
) -> None:
    tensors = pair()
    tensors[f"base_model.model.{QUERY}.lora_{side}.weight"][1, 2] = number
    (found,) = read(reader(), tmp_path, tensors)
    target = torch.zeros(64, 64, dtype=dtype)
    fits = number == 4e4 and dtype != torch.float16  # twice that is too large
    with nullcontext() if fits else pytest.raises(MantaError, match=rf"q_proj.lora_{side}.weight holds numbers that"):
        found.expect_numbers(dtype)
    found.first_into(target[:4], slice(0, 4))
    found.second_into(target[:, 4:8], slice(0, 4))
    assert are_numbers(target) is fits


def test_experts_and_fused_tensors_of_other_sizes_are_refused(tmp_path: Path) -> None:
    family, changes = EXPERT_VARIANTS["mixtral"]
    with pytest.raises(MantaError, match=r"experts.0.gate_proj: LoRA on experts: start the engine with lora_experts"):
        read(reader(family, **changes), tmp_path / "a", pair("model.layers.0.mlp.experts.0.gate_proj", size_out=112))
    with pytest.raises(MantaError, match="qkv_proj"):
        read(reader("phi3", pad_token_id=0), tmp_path / "b", pair("model.layers.0.self_attn.qkv_proj", size_out=100))
