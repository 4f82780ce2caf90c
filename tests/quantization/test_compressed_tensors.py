"""Checkpoints that compressed-tensors itself packs, against transformers with the weights that it unpacks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from app.errors import CheckpointError, UnsupportedError
from app.quantization import select_quantization
from tests.quantization.checkpoints import HEADS, Pack, change, check_logits, check_weights, write
from tests.quantization.test_fp8 import round_linear_layers
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 200, 31], list(range(40, 60))]
INT = {"type": "int", "symmetric": True}
FP8 = {"type": "float", "num_bits": 8}
TOKENS = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}
FP8_TOKENS = {**FP8, "strategy": "token", "dynamic": True}
FP8_STATIC = {**FP8, "strategy": "tensor", "dynamic": False}
FP4_INPUTS = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
# name: (format, weights, activations)
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    **{
        f"w{bits}a16-{name}": ("pack-quantized", {**INT, "num_bits": bits, **more}, None)
        for bits in range(2, 9)
        for name, more in {
            "group": {"strategy": "group", "group_size": 16},
            "asym": {"strategy": "group", "group_size": 32, "symmetric": False},
            "channel": {"strategy": "channel", "symmetric": False},
        }.items()
    },
    "w4a16-tensor": ("pack-quantized", {**INT, "num_bits": 4, "strategy": "tensor"}, None),
    "w4a8": ("pack-quantized", {**INT, "num_bits": 4, "strategy": "group", "group_size": 16}, TOKENS),
    "w8a16-bytes": ("int-quantized", {**INT, "num_bits": 8, "strategy": "group", "group_size": 16}, None),
    "w8a8-asym-inputs": (
        "int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}, {**TOKENS, "symmetric": False},
    ),
    "nvfp4": ("nvfp4-pack-quantized", {**FP8, "num_bits": 4, "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn"}, None),
    "nvfp4-inputs": ("nvfp4-pack-quantized", {**FP8, "num_bits": 4, "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn"}, FP4_INPUTS),
    "mxfp4": ("mxfp4-pack-quantized", {**FP8, "num_bits": 4, "strategy": "group", "group_size": 32,
        "scale_dtype": "torch.uint8"}, None),
    "mxfp8": ("mxfp8-quantized", {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        {**FP8, "strategy": "group", "group_size": 32, "dynamic": True}),
    **{f"fp8a16-{kind}": ("float-quantized", {**FP8, "strategy": kind}, None) for kind in ("tensor", "channel")},
}  # fmt: skip
# The same whose activations are rounded: only weights are compared.
ROUNDED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w8a8": ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}, TOKENS),
    "w8a8-tensor": ("int-quantized", {**INT, "num_bits": 8, "strategy": "tensor"}, TOKENS),
    "fp8-tensor": ("float-quantized", {**FP8, "strategy": "tensor"}, FP8_STATIC),
    "fp8-tensor-dynamic": ("float-quantized", {**FP8, "strategy": "tensor"}, FP8_TOKENS),
    "fp8-channel": ("naive-quantized", {**FP8, "strategy": "channel"}, FP8_TOKENS),
    "fp8-block": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [32, 24]}, None),
}
SAMPLE = set(random.Random(7).sample(sorted(FORMS), 5)) | {
    "nvfp4",
    "mxfp4",
    "mxfp8",
    "fp8a16-channel",
    "w4a16-group",
    "w3a16-asym",
}


def reduced(x: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest of what shares a scale."""
    if args.strategy == "tensor":
        return x.amin().reshape(1), x.amax().reshape(1)
    if args.strategy == "channel":
        return x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    rows, columns = args.block_structure or (1, args.group_size)
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def library(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Pack:
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=QuantizationArgs(**inputs) if inputs else None
    )
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        state = {"weight": weight}
        low, high = reduced(weight, args)
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        scale, zero = calculate_qparams(low, high, args, state.get("weight_global_scale"))
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(state, scheme)
        plain = compressor.decompress(dict(packed), scheme)["weight"].float()
        if args.strategy == "tensor_group":  # which the library multiplies in bf16
            numbers = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float32)
            scale, whole = packed["weight_scale"].float(), packed["weight_global_scale"]
            plain = dequantize(numbers, scale, args=args, dtype=torch.float32, global_scale=whole)
        if inputs and not inputs.get("dynamic"):
            packed["input_scale"] = torch.tensor([0.03 + len(name) / 1000])
        return packed, plain

    return pack


def config(form: str, **groups: tuple[list[str], Mapping[str, Any], Mapping[str, Any] | None]) -> dict[str, Any]:
    schemes = {
        name: {"targets": targets, "weights": dict(weights), "input_activations": inputs and dict(inputs)}
        for name, (targets, weights, inputs) in groups.items()
    }
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": schemes, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in sorted(FORMS)]
)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    form, weights, inputs = FORMS[name]
    source = tiny_model("llama", intermediate_size=96, **HEADS)
    scheme = config(form, group_0=(["Linear"], weights, inputs))
    directory = write(source, tmp_path, library(form, weights, inputs), scheme)
    check_logits(directory)
    check_weights(directory, tp=2)


@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_weights_are_those_of_the_library(tmp_path: Path, name: str) -> None:
    form, weights, inputs = ROUNDED[name]
    source = tiny_model("llama", intermediate_size=96, **HEADS)
    directory = write(source, tmp_path, library(form, weights, inputs), config(form, a=(["Linear"], weights, inputs)))
    check_weights(directory)
    check_weights(directory, tp=2)


def test_activations_in_fp8(tmp_path: Path) -> None:
    """Tokens of transformers with weights and activations rounded from outside."""
    form, weights, inputs = ROUNDED["fp8-channel"]
    source = tiny_model("llama")
    directory = write(source, tmp_path, library(form, weights, inputs), config(form, a=(["Linear"], weights, inputs)))
    judge = hf_model(source)
    round_linear_layers(judge)
    driver = Driver(str(directory), num_blocks=16)
    assert "quantization: compressed-tensors (linear layers, as in the checkpoint)" in driver.info.notes
    found = driver.run([Run(prompt, greedy(12)) for prompt in PROMPTS])
    assert [run.tokens for run in found] == [hf_greedy(judge, prompt, 12) for prompt in PROMPTS]


def test_modules_are_told_apart(tmp_path: Path) -> None:
    """Names before classes, patterns, a group's own format, and modules that are left as they were."""
    four = FORMS["w4a16-group"][1]
    eight = {**INT, "num_bits": 8, "strategy": "channel"}
    scheme = config(
        "mixed-precision",
        a=(["Linear"], four, None),
        b=([r"re:.*\.(v|down)_proj$", "model.layers.0.mlp.up_proj"], eight, None),
    )
    scheme["config_groups"]["a"]["format"] = scheme["config_groups"]["b"]["format"] = "pack-quantized"
    scheme["ignore"] += ["model.layers.1.self_attn.q_proj", r"re:.*layers\.1\.mlp\.gate.*"]
    packs = {4: library("pack-quantized", four, None), 8: library("pack-quantized", eight, None)}

    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
        if name.endswith("1.self_attn.q_proj") or "1.mlp.gate" in name:
            return None
        coarse = name.endswith(("v_proj", "down_proj")) or name == "model.layers.0.mlp.up_proj"
        return packs[8 if coarse else 4](name, weight)

    source = tiny_model("llama", intermediate_size=96, **HEADS)
    check_logits(write(source, tmp_path, pack, scheme))


def test_a_quantized_head(tmp_path: Path) -> None:
    form, weights, _ = FORMS["w4a16-group"]
    source = tiny_model("llama", tie_word_embeddings=False, intermediate_size=96)
    scheme = {**config(form, a=(["Linear"], weights, None)), "ignore": []}
    driver = check_logits(
        write(source, tmp_path, library(form, weights, None), scheme, linear=r"(_proj|lm_head)\.weight$")
    )
    assert driver.worker._runner is not None
    head: Any = driver.worker._runner._forward.model.lm_head
    assert head.stored is not None


def test_fused_projections_of_the_checkpoint(tmp_path: Path) -> None:
    form, weights, _ = FORMS["w4a16-asym"]
    source = tiny_model("phi3", intermediate_size=96, pad_token_id=0)
    scheme = config(form, a=(["Linear"], weights, None))
    check_logits(write(source, tmp_path, library(form, weights, None), scheme))


def test_old_checkpoints_whose_groups_are_out_of_order(tmp_path: Path) -> None:
    """`actorder: group`, which the library no longer writes: columns packed in their own order, and whose group each
    is."""
    form, weights, _ = FORMS["w4a16-asym"]
    pack = library(form, weights, None)

    def shuffled(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(name)))
        made = pack(name, weight[:, order])
        assert made is not None
        places = order.argsort()
        groups = (torch.arange(weight.shape[1]) // 32)[places].int()
        plain = made[1][:, places]
        unpacked = unpack_from_int32(made[0]["weight_packed"], 4, weight.shape)
        return {**made[0], "weight_packed": pack_to_int32(unpacked[:, places], 4), "weight_g_idx": groups}, plain

    source = tiny_model("llama", intermediate_size=96, **HEADS)
    scheme = config(form, a=(["Linear"], {**weights, "actorder": "group"}, None))
    directory = write(source, tmp_path, shuffled, scheme)
    check_logits(directory)
    check_weights(directory, tp=2)


@pytest.mark.parametrize(
    ("leaf", "make", "message"),
    [
        ("weight_scale", None, "the checkpoint lacks model.layers.0.mlp.down_proj.weight_scale"),
        (
            "weight_scale",
            lambda x: x[:, 1:],
            r"down_proj.weight_scale .* \[64, 5\], the model expects \[64, 6\]",
        ),
        ("weight_packed", lambda x: x[1:], r"down_proj.weight_packed .* has shape \[63, 12\]"),
        ("weight_packed", lambda x: x.long(), "down_proj.weight_packed .* holds int64, the model expects int32"),
        ("weight_zero_point", None, "lacks model.layers.0.mlp.down_proj.weight_zero_point"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, leaf: str, make: Any, message: str) -> None:
    form, weights, _ = ("pack-quantized", {**INT, "num_bits": 4, "strategy": "group", "group_size": 16}, None)
    if leaf == "weight_zero_point":
        weights["symmetric"] = False
    source = tiny_model("llama", intermediate_size=96)
    directory = write(source, tmp_path, library(form, weights, None), config(form, a=(["Linear"], weights, None)))
    change(directory, f"model.layers.0.mlp.down_proj.{leaf}", make)
    with pytest.raises(CheckpointError, match=message):
        Driver(str(directory), num_blocks=16)


def test_dummy_weights_of_its_types(tmp_path: Path) -> None:
    for name in ("w4a16-asym", "nvfp4"):
        form, weights, inputs = FORMS[name]
        scheme = config(form, a=(["Linear"], weights, inputs))
        directory = write(tiny_model("llama"), tmp_path / name, lambda name, weight: None, scheme)
        driver = Driver(str(directory), num_blocks=16, load_format="dummy")
        assert len(driver.run([Run(PROMPTS[0], greedy(3))])[0].tokens) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "marlin-24"}, r"sparse weights \(marlin-24\)"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparse weights \(sparse-24-bitmask\)"),
        ({"weights": {"num_bits": 6, "type": "float"}}, "a: weights of type='float', num_bits=6"),
        ({"format": "int-quantized", "weights": {**INT, "num_bits": 4, "symmetric": False}}, "symmetric=False, a"),
        ({"weights": {**FP8, "strategy": "group", "group_size": 32}}, "a: fp8 weights with strategy='group'"),
        ({"weights": {**FP8, "strategy": "block"}}, "a: weights with block_structure=None"),
        ({"weights": {**INT, "num_bits": 4, "strategy": "block"}}, "a: weights with strategy='block'"),
        ({"weights": {**INT, "num_bits": 4, "strategy": "group", "group_size": 0}}, "a: weights with group_size=0"),
        ({"weights": {**INT, "num_bits": 4, "actorder": "random"}}, "a: weights with actorder='random'"),
        ({"output_activations": TOKENS}, "a: output_activations"),
        ({"weights": None}, "a: activations are quantized, and no weights"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "weights behind a transform"),
    ],
)
def test_other_forms_are_refused(changes: dict[str, Any], message: str) -> None:
    scheme = config("pack-quantized", a=(["Linear"], {**INT, "num_bits": 4}, None))
    for name, value in changes.items():
        (scheme["config_groups"]["a"] if name in scheme["config_groups"]["a"] or "act" in name else scheme)[name] = (
            value
        )
    with pytest.raises(UnsupportedError, match=message):
        select_quantization(None, scheme, CPU, torch.float32)
