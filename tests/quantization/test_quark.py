"""Quark's checkpoints from a packer of our own (4-bit floats by compressed-tensors' table), with the names, orders of
packing and signs of its exporter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

from app.errors import CheckpointError, UnsupportedError
from app.quantization.quark import Quark
from tests.loading.load_formats.formats import fill
from tests.quantization.checkpoints import HEADS, Pack, change, check_logits, check_weights, write
from tests.quantization.test_awq import COLUMN_OF_NIBBLE
from tests.quantization.test_modelopt import fp8, mxfp8, nvfp4
from tests.tiny_models import tiny_model

DOWN = "model.layers.0.mlp.down_proj"
SIZES: dict[str, Any] = {**HEADS, "intermediate_size": 96}
Packed = tuple[Mapping[str, torch.Tensor], torch.Tensor]


def int4(symmetric: bool, order: list[int]) -> Pack:
    def pack(name: str, weight: torch.Tensor) -> Packed:
        groups = weight.unflatten(1, (-1, 32))
        low, high = groups.amin(2), groups.amax(2)
        scale = groups.abs().amax(2) / 7 if symmetric else (high - low) / 15
        zero = torch.zeros_like(scale) if symmetric else (-low / scale).round()
        codes = (groups / scale[..., None] + zero[..., None]).round().clamp(*((-8, 7) if symmetric else (0, 15)))
        plain = ((codes - zero[..., None]) * scale[..., None]).flatten(1)
        stored = {"weight": words(codes.flatten(1).t(), order), "weight_scale": scale.t()}
        return {**stored, "weight_zero_point": words(zero.t(), order)}, plain

    return pack


def words(codes: torch.Tensor, order: list[int]) -> torch.Tensor:
    """[M, N], four bits of two's complement -> int32 [M, N / 8]."""
    nibbles = (codes.numpy().astype(np.int64) & 15).astype(np.uint32)
    packed = np.zeros((len(nibbles), nibbles.shape[1] // 8), dtype=np.uint32)
    for nibble, column in enumerate(order):
        packed |= nibbles[:, column::8] << np.uint32(4 * nibble)
    return torch.from_numpy(packed.view(np.int32))


def mxfp4(name: str, weight: torch.Tensor) -> Packed:
    groups = weight.unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(2) / 6).log2().ceil()
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = groups / exponent.exp2()[..., None]
    nearest = numbers[(scaled.abs()[..., None] - numbers).abs().argmin(-1)] * scaled.sign()
    codes = pack_fp4_to_uint8(nearest.flatten(1))
    values = unpack_fp4_from_uint8(codes, *weight.shape, dtype=torch.float32).unflatten(1, (-1, 32))
    return {"weight": codes, "weight_scale": (exponent + 127).to(torch.uint8)}, (
        values * exponent.exp2()[..., None]
    ).flatten(1)


def int8(per_output: bool) -> Pack:
    def pack(name: str, weight: torch.Tensor) -> Packed:
        scale = weight.abs().amax(1) / 127 if per_output else weight.abs().amax() / 127
        step = scale.unsqueeze(1) if per_output else scale
        codes = (weight / step).round()
        zeros = {"weight_zero_point": torch.zeros_like(scale, dtype=torch.int8)}
        return {"weight": codes.to(torch.int8), "weight_scale": scale, **zeros}, codes * step

    return pack


def pair(first: Pack, second: Pack) -> Pack:
    """Attention's projections by the first, the others by the second."""
    return lambda name, weight: (first if "self_attn" in name else second)(name, weight)


def table(dtype: str, scheme: str, inputs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": scheme, "is_dynamic": False, "symmetric": True, "ch_axis": 0, **more}
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}


def config(everywhere: Mapping[str, Any], pack: str = "reorder", **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": everywhere,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": pack, "weight_format": "real_quantized"},
        **more,
    }


TOKEN = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True, "symmetric": True}
STATIC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
WHOLE = {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": True, "symmetric": True}
MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True, "scale_format": "e8m0"}
MXFP4 = table("fp4", "per_group", MX, group_size=32, scale_format="e8m0")
NV_LEVELS = [
    {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "is_dynamic": False},
    {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
]
SIGNED = table("int4", "per_group", group_size=32)
PLAIN_ORDER = list(range(8))
FORMS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "int4": (int4(True, COLUMN_OF_NIBBLE), config(SIGNED)),
    "uint4-in-order": (
        int4(False, PLAIN_ORDER),
        config(table("uint4", "per_group", group_size=32, symmetric=False), "order"),
    ),
    "mxfp4": (mxfp4, config(MXFP4)),
    "mxfp8": (mxfp8, config(table("fp8_e4m3", "per_group", TOKEN, group_size=32, scale_format="e8m0"))),
    "nvfp4": (nvfp4, config({"weight": NV_LEVELS, "input_tensors": NV_LEVELS})),
    "fp8-static": (fp8("static"), config(table("fp8_e4m3", "per_tensor", STATIC))),
    "fp8-rows": (fp8("row"), config(table("fp8_e4m3", "per_channel", TOKEN))),
    "int8-rows": (int8(True), config(table("int8", "per_channel", WHOLE))),
    "int8-tensor": (int8(False), config(table("int8", "per_tensor", WHOLE))),
    "mixed": (
        pair(fp8("row"), mxfp4),
        config(MXFP4, layer_quant_config={"*self_attn*": table("fp8_e4m3", "per_channel", TOKEN)}),
    ),
}


def made(form: str, directory: Path) -> Path:
    return write(tiny_model("llama", **SIZES), directory, *FORMS[form])


@pytest.mark.parametrize("form", ["int4", "uint4-in-order"])
def test_logits_are_those_of_its_weights(form: str, tmp_path: Path) -> None:
    check_logits(made(form, tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_each_rank_has_its_shares(form: str, tmp_path: Path) -> None:
    check_weights(made(form, tmp_path), tp=2)


def test_excluded_modules_are_plain(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> Packed | None:
        return None if "layers.1." in name or name.endswith("o_proj") else mxfp4(name, weight)

    excluded = ["lm_head", "re:model\\.layers\\.1\\.", "*.o_proj"]
    check_logits(write(tiny_model("llama", **SIZES), tmp_path, pack, config(MXFP4, exclude=excluded)))


def test_scales_of_the_kv_cache_are_no_matter_of_the_weights(tmp_path: Path) -> None:
    cached = {**SIGNED, "output_tensors": STATIC}
    export = {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"}
    scheme = config(SIGNED, layer_quant_config={"*k_proj": cached, "*v_proj": cached}, export=export)

    def pack(name: str, weight: torch.Tensor) -> Packed:
        stored, plain = int4(True, COLUMN_OF_NIBBLE)(name, weight)
        is_cached = name.endswith(("k_proj", "v_proj"))
        return {**stored, **({"output_scale": torch.tensor(0.5)} if is_cached else {})}, plain

    check_logits(write(tiny_model("llama", **SIZES), tmp_path, pack, scheme))
    with pytest.raises(UnsupportedError, match=r"quark: \*k_proj: output_tensors"):
        Quark.of_checkpoint({**scheme, "export": {}})


@pytest.mark.parametrize(
    ("leaf", "edit", "message"),
    [
        ("weight_scale", None, r"lacks .*down_proj\.weight_scale"),
        ("weight_scale", lambda x: x[:2], r"down_proj\.weight_scale .* \[2, 64\]"),
        ("weight", lambda x: x[:, :3], r"down_proj\.weight .* \[96, 3\]"),
        ("weight", lambda x: x.to(torch.int64), r"down_proj\.weight .* holds int64"),
    ],
)
def test_what_is_missing_or_misshapen_is_named(leaf: str, edit: Any, message: str, tmp_path: Path) -> None:
    directory = made("int4", tmp_path)
    change(directory, f"{DOWN}.{leaf}", edit)
    with pytest.raises(CheckpointError, match=message):
        fill(directory)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (config(table("fp6_e3m2", "per_group", MX, group_size=32)), "dtype=fp6_e3m2, qscheme='per_group'"),
        (config(table("fp8_e4m3", "per_tensor")), "weight of fp8_e4m3, input_tensors of None"),
        (config(table("fp8_e4m3", "per_channel", TOKEN, ch_axis=1)), "qscheme='per_channel', ch_axis=1"),
        (config(table("int4", "per_channel")), "dtype=int4 with qscheme='per_channel', group_size=None"),
        (config(table("int8", "per_tensor", {**WHOLE, "is_dynamic": False})), "static input_tensors with qscheme"),
        (config({**SIGNED, "bias": STATIC}), "global_quant_config: a quantized bias"),
        (config(SIGNED, "interleaved"), "export.pack_method='interleaved'; known: reorder, order"),
        (config(SIGNED, layer_type_quant_config={"Linear": SIGNED}), "layer_type_quant_config is not read"),
        (config(SIGNED, export={"weight_format": "fake_quantized"}), "weight_format='fake_quantized'"),
    ],
)
def test_what_is_not_read_is_named(scheme: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match="quark: .*" + message):
        Quark.of_checkpoint(scheme)
