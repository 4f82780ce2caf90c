"""Checkpoints of `quant_method` fp8: by block (as transformers dequantizes them), by tensor and by output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from app.errors import CheckpointError, UnsupportedError
from app.quantization import select_quantization
from tests.quantization.checkpoints import HEADS, Pack, change, check_weights, write
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver

BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 16], "fmt": "e4m3"}
FP8 = torch.float8_e4m3fn


def by_block(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
    if "layers.1.mlp.up" in name:
        return None
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 16, 0, -weight.shape[0] % 32))
    blocks = padded.unflatten(1, (-1, 16)).unflatten(0, (-1, 32))
    scale = blocks.abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(32, 0).repeat_interleave(16, 1)[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(FP8)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def by_tensor(shape: tuple[int, ...], static: bool, names: tuple[str, str] = ("weight_scale", "input_scale")) -> Pack:
    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        scale = weight.abs().amax() / 448
        codes = (weight / scale).to(FP8)
        more = {names[1]: torch.tensor(0.02)} if static else {}
        return {"weight": codes, names[0]: scale.reshape(shape), **more}, codes.float() * scale

    return pack


def by_output(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(FP8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def test_blocks(tmp_path: Path) -> None:
    """160 outputs are 5 blocks, of which each of two ranks has 2.5; transformers reads the same weights."""
    scheme = {**BLOCK, "modules_to_not_convert": ["model.layers.1.mlp.up_proj", "lm_head"]}
    directory = write(tiny_model("llama", intermediate_size=160, **HEADS), tmp_path, by_block, scheme)
    for tp in (1, 2):
        check_weights(directory, tp)
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=FineGrainedFP8Config(weight_block_size=(32, 16), dequantize=True)
    )
    plain = AutoModelForCausalLM.from_pretrained(directory.parent / "judge")
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(weight, plain.get_parameter(name), rtol=1e-2, atol=1e-3)
    assert Driver(str(directory), num_blocks=16).info.notes


OF_TRANSFORMERS = ("weight_scale_inv", "activation_scale")


@pytest.mark.parametrize(
    ("shape", "names"), [((), OF_TRANSFORMERS), ((1,), ("weight_scale", "input_scale")), ((1,), OF_TRANSFORMERS)]
)
def test_a_scale_of_the_tensor(tmp_path: Path, shape: tuple[int, ...], names: tuple[str, str]) -> None:
    scheme = {
        "quant_method": "fp8",
        "activation_scheme": "static" if shape else "dynamic",
        "ignored_layers": ["lm_head"],
    }
    directory = write(tiny_model("llama", **HEADS), tmp_path, by_tensor(shape, bool(shape), names), scheme)
    check_weights(directory, tp=2)
    assert Driver(str(directory), num_blocks=16).info.notes


def test_a_scale_of_each_output(tmp_path: Path) -> None:
    scheme = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    directory = write(tiny_model("llama", **HEADS), tmp_path, by_output, scheme)
    check_weights(directory, tp=2)
    layer = Driver(str(directory), num_blocks=16).worker._parts.model.model.layers["0"]
    assert layer.self_attn.qkv_proj.packed.most == layer.mlp.down_proj.packed.most == 1200.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (None, "lacks model.layers.0.mlp.down_proj.weight_scale_inv"),
        (lambda x: x[:, 1:], r"down_proj.weight_scale_inv .* \[2, 6\], the model expects \[2, 7\]"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, make: Any, message: str) -> None:
    directory = write(tiny_model("llama"), tmp_path, by_block, BLOCK)
    change(directory, "model.layers.0.mlp.down_proj.weight_scale_inv", make)
    with pytest.raises(CheckpointError, match=message):
        Driver(str(directory), num_blocks=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\], not two sizes"),
        ({"activation_scheme": "static"}, "activation_scheme=static"),
        ({"fmt": "e5m2"}, "fmt=e5m2"),
        ({"activation_scale_ub": 0}, "activation_scale_ub is 0, not a number above 0"),
    ],
)
def test_other_forms_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        select_quantization(None, {**BLOCK, **changes}, torch.device("cpu"), torch.float32)
