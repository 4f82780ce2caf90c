"""Checkpoints that torchao itself packs, against transformers with the weights that it unpacks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.quantization as ao
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

from app.errors import CheckpointError, MantaError, UnsupportedError
from app.quantization.torchao import TorchAo
from tests.loading.load_formats.formats import fill
from tests.quantization.checkpoints import HEADS, Pack, change, check_logits, check_weights, write
from tests.tiny_models import tiny_model

DOWN = "model.layers.0.mlp.down_proj."
ASYMMETRIC = {"mapping_type": ao.MappingType.ASYMMETRIC}
CONFIGS: dict[str, Any] = {
    "int8": ao.Int8WeightOnlyConfig(),
    "int8-groups": ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(16)),
    "int8-both": ao.Int8DynamicActivationInt8WeightConfig(),
    "int4-asym": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(16), **ASYMMETRIC),
    "int3": ao.IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=ao.PerGroup(16)),
    "fp8": ao.Float8WeightOnlyConfig(),
}
EXACT = ("int8-groups", "int4-asym", "int3")  # activations stay as they are
INT4 = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 16}}


def scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": dict(config)}}


def library(config: Any) -> Pack:
    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        layer = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        layer[0].weight.data = weight.clone()
        ao.quantize_(layer, config)
        stored, _ = flatten_tensor_state_dict(layer.state_dict())
        return {name.removeprefix("0."): tensor for name, tensor in stored.items()}, layer[0].weight.dequantize()

    return pack


def nibbles(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Int4Tensor's layout, which torchao makes on a GPU only: asymmetric groups around their centre."""
    groups = weight.unflatten(1, (-1, 16))
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale).round().clamp(0, 15) - 8
    centre = low + 8 * scale
    whole = codes.flatten(1).to(torch.int8)
    packed = (whole[:, 1::2] << 4) | (whole[:, ::2] & 15)
    stored = {"qdata": packed, "scale": scale.squeeze(2).t(), "zero_point": centre.squeeze(2).t()}
    return {f"_weight_{leaf}": x.contiguous() for leaf, x in stored.items()}, (codes * scale + centre).flatten(1)


def made(form: str, directory: Path) -> Path:
    source = tiny_model("llama", **HEADS)
    if form == "nibbles":
        return write(source, directory, nibbles, scheme(INT4))
    config = CONFIGS[form]
    return write(source, directory, library(config), scheme(config_to_dict(config)))


@pytest.mark.parametrize("form", [*EXACT, "nibbles"])
def test_logits_are_those_of_its_weights(form: str, tmp_path: Path) -> None:
    check_logits(made(form, tmp_path))


@pytest.mark.parametrize("form", [*CONFIGS, "nibbles"])
def test_each_rank_has_its_shares(form: str, tmp_path: Path) -> None:
    """Of 112 inputs a rank's share begins within a group of 16."""
    check_weights(made(form, tmp_path), tp=2)


@pytest.mark.parametrize(
    ("form", "leaf", "edit", "message"),
    [
        ("int8-groups", "_weight_scale", None, r"lacks .*down_proj\._weight_scale"),
        ("int8-groups", "_weight_scale", lambda x: x[:, :3], r"_weight_scale has shape \[64, 3\], which is none for"),
        ("int8-groups", "_weight_qdata", lambda x: x[:, :9], r"_weight_qdata is int8 \[64, 9\]: in an order made for"),
        (
            "nibbles",
            "_weight_scale",
            lambda x: x.flatten(),
            r"down_proj cannot be read as quantization_config describes it",
        ),
        ("fp8", "_weight_scale", lambda x: x[:5], r"_weight_scale has shape \[5, 1\], not a number for each of 64"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(
    form: str, leaf: str, edit: Callable[[torch.Tensor], torch.Tensor] | None, message: str, tmp_path: Path
) -> None:
    directory = made(form, tmp_path)
    change(directory, DOWN + leaf, edit)
    with pytest.raises(MantaError, match=message) as caught:
        fill(directory)
    assert isinstance(caught.value, CheckpointError | UnsupportedError)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    odd = {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"a": INT4, "b": {"_type": "UIntXWeightOnlyConfig"}}}}
    with pytest.raises(UnsupportedError, match="UIntXWeightOnlyConfig is not supported; known: Float8"):
        TorchAo.of_checkpoint(scheme(odd))
    with pytest.raises(UnsupportedError, match="quant_type 'int8_weight_only' is of an older form"):
        TorchAo.of_checkpoint({"quant_type": "int8_weight_only"})
    directory = Path(shutil.copytree(made("int8", tmp_path), tmp_path / "tiles"))
    change(directory, DOWN + "_weight_qdata", lambda x: torch.zeros(8, 1, 32, 4, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match=r"_weight_qdata is int32 \[8, 1, 32, 4\]: in an order made"):
        fill(directory)
