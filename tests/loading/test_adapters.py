"""An adapter's tensors find their places in the model, or are refused by name. That the places are right, PEFT says in
tests/worker/lora."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.errors import MantaError
from app.loading.adapters import AdapterReader, LayerPair
from tests.adapters import pair, write_adapter
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver


def reader(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> AdapterReader:
    worker = Driver(str(tiny_model(family, **changes)), num_blocks=8).worker
    assert worker._parts is not None
    return AdapterReader(worker._parts.model, dtype, frozenset({"model.layers.9.mlp.up_proj.weight"}))


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
        assert torch.equal(one.first, tensors[f"{prefix}A.weight"])
        assert torch.equal(one.second, tensors[f"{prefix}B.weight"] * 2), "the factor is in the second"


def test_layers_of_other_stages_are_left_to_them(tmp_path: Path) -> None:
    assert read(reader(), tmp_path, pair("model.layers.9.mlp.up_proj", size_out=112)) == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (pair("model.layers.7.self_attn.q_proj"), "model.layers.7.self_attn.q_proj: the model has no such layer"),
        (pair("lm_head", size_out=331), "lm_head: LoRA on the output head is not supported"),
        (pair(size_in=32), "for 32 inputs and 64 outputs; the layer has 64 and 64"),
        (pair(size_out=63), "for 64 inputs and 63 outputs"),
        ({name: x * torch.nan for name, x in pair().items()}, r"q_proj.lora_A.weight holds numbers that are none"),
    ],
)
def test_what_the_model_has_no_place_for_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(MantaError, match=message):
        read(reader(), tmp_path, tensors)


def test_numbers_that_the_models_type_does_not_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MantaError, match="too large for float16"):
        read(reader(dtype=torch.float16), tmp_path, {name: x * 1e5 for name, x in pair().items()})


def test_experts_and_fused_tensors_of_other_sizes_are_refused(tmp_path: Path) -> None:
    family, changes = EXPERT_VARIANTS["mixtral"]
    with pytest.raises(MantaError, match=r"experts.0.gate_proj: LoRA on .* is not supported"):
        read(reader(family, **changes), tmp_path / "a", pair("model.layers.0.mlp.experts.0.gate_proj", size_out=112))
    with pytest.raises(MantaError, match="qkv_proj"):
        read(reader("phi3", pad_token_id=0), tmp_path / "b", pair("model.layers.0.self_attn.qkv_proj", size_out=100))
