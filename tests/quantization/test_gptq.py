"""Checkpoints of GPTQ, packed here bit by bit from AutoGPTQ's description, against transformers with the weights."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from app.errors import CheckpointError, UnsupportedError
from app.layers.weight import Weight, WeightSpec, load_replicated
from app.loading.load_formats.base import LoadRequest
from app.loading.load_formats.dummy import Dummy
from app.quantization import select_quantization
from app.quantization.bits import unpack_bits
from app.quantization.gptq import StoredGptq
from tests.quantization.checkpoints import HEADS, Pack, change, check_logits, check_weights, write
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver

SCHEME: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
GRID = list(itertools.product((2, 3, 4, 8), ("gptq", "gptq_v2"), (32, -1), (False, True), (False, True)))
SAMPLE = [*random.Random(3).sample(GRID, 3), (4, "gptq", 32, True, False), (3, "gptq", 32, True, True)]


def words(codes: np.ndarray, bits: int) -> torch.Tensor:
    """[M, N], along the second dimension: bit b of code i is bit (i * bits + b) % 32 of word (i * bits + b) // 32."""
    rows = codes.shape[0]
    stream = ((codes[:, :, None] >> np.arange(bits)) & 1).reshape(rows, -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32))).reshape(rows, -1, 32).astype(np.uint64)
    packed = (stream << np.arange(32, dtype=np.uint64)).sum(2).astype(np.uint32)
    return torch.from_numpy(packed.view(np.int32))


def gptq(
    bits: int = 4, form: str = "gptq", group: int = 32, act_order: bool = False, sym: bool = False,
    rules: Mapping[str, dict[str, int] | None] | None = None,
) -> Pack:  # fmt: skip
    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
        options: dict[str, int] | None = next((o for p, o in (rules or {}).items() if re.match(p, name)), {})
        return None if options is None else _packed(weight, **{**base, **options})  # type: ignore[arg-type]

    base: dict[str, Any] = {"bits": bits, "form": form, "group": group, "act_order": act_order, "sym": sym}
    return pack


def _packed(
    weight: torch.Tensor, bits: int, form: str, group: int, act_order: bool, sym: bool
) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    inputs = weight.shape[1]
    size, most = inputs if group == -1 else group, (1 << bits) - 1
    generator = torch.Generator().manual_seed(inputs)
    groups = torch.arange(inputs) // size
    if act_order:
        groups = groups[torch.randperm(inputs, generator=generator)]
    members = [weight[:, groups == g] for g in range(int(groups.max()) + 1)]
    low, high = (torch.stack([one(x, 1) for x in members], 1) for one in (torch.amin, torch.amax))
    scale = ((high - low) / most).half()
    zero = torch.full_like(low, (most + 1) // 2) if sym else (-low / scale).round().clamp(0, most)
    if not sym:
        zero[0], zero[1] = 0, most  # the ends of the range
    codes = (weight / scale[:, groups].float() + zero[:, groups]).round().clamp(0, most)
    plain = (codes - zero[:, groups]) * scale[:, groups].float()
    stored = (zero.int() - int(form == "gptq")) & most
    return {
        "qweight": words(codes.int().numpy(), bits).t(),
        "qzeros": words(stored.t().numpy(), bits),
        "scales": scale.t(),
        "g_idx": groups.int(),
    }, plain


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLE else pytest.mark.slow) for case in GRID]
)
def test_logits_equal_transformers(tmp_path: Path, case: tuple[int, str, int, bool, bool]) -> None:
    bits, form, group, act_order, sym = case
    source = tiny_model("llama", intermediate_size=160, **HEADS)  # 80 inputs on a rank
    scheme = {**SCHEME, "bits": bits, "group_size": group, "desc_act": act_order, "sym": sym, "checkpoint_format": form}
    directory = write(source, tmp_path, gptq(bits, form, group, act_order, sym), scheme)
    check_logits(directory)
    check_weights(directory, tp=2)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros_less_one", [True, False])
def test_dummy_zeros_are_those_of_symmetric_checkpoints(bits: int, zeros_less_one: bool) -> None:
    method = StoredGptq(torch.float32, bits, 64, zeros_less_one, ordered=False)
    leaf = next(leaf for leaf in method.leaves(torch.float32) if leaf.name == "qzeros")
    layer: Any = nn.Module()
    layer.qzeros = Weight(torch.empty(2, 4, dtype=leaf.dtype), WeightSpec(load_replicated, dummy=leaf.dummy))
    Dummy().fill(layer, LoadRequest(Path(), cast(Any, SimpleNamespace(device=torch.device("cpu")))))
    assert (unpack_bits(layer.qzeros.data, bits).int() + zeros_less_one).unique().tolist() == [1 << (bits - 1)]


def test_rules_for_modules_and_a_quantized_head(tmp_path: Path) -> None:
    rules = {
        r"model\.layers\.0\.mlp\.": {"bits": 8, "group": 16}, r".*\.o_proj": None, r".*\.v_proj": {"bits": 3},
    }  # fmt: skip
    dynamic = {
        r"+:model\.layers\.0\.mlp\.": {"bits": 8, "group_size": 16}, r"-:.*\.o_proj": {}, r".*\.v_proj": {"bits": 3},
    }  # fmt: skip
    source = tiny_model("llama", vocab_size=352, tie_word_embeddings=False, intermediate_size=96)
    pack = gptq(rules=rules)  # type: ignore[arg-type]
    scheme = {**SCHEME, "dynamic": dynamic, "lm_head": True}
    check_logits(write(source, tmp_path, pack, scheme, linear=r"(_proj|lm_head)\.weight$"))


def test_biases_of_zeros_that_autogptq_added(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
        made = gptq()(name, weight)
        assert made is not None
        return {**made[0], "bias": torch.zeros(len(weight))}, made[1]

    directory = write(tiny_model("llama", intermediate_size=96), tmp_path, pack, SCHEME)
    check_logits(directory)
    change(directory, "model.layers.0.mlp.up_proj.bias", lambda x: x + 1)
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj.bias: the model has no such bias"):
        Driver(str(directory), num_blocks=16)


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
def test_scales_of_the_cache_beside_packed_weights(tmp_path: Path, names: tuple[str, str]) -> None:
    directory = write(tiny_model("llama", intermediate_size=96), tmp_path, gptq(), SCHEME)
    tensors = load_file(directory / "model.safetensors")
    for number, name in enumerate(names):
        tensors[f"model.layers.1.self_attn.{name}"] = torch.tensor([0.25 * (number + 1)])
    save_file(tensors, directory / "model.safetensors")
    driver = Driver(str(directory), num_blocks=16, kv_cache_dtype="fp8")
    assert driver.worker._runner is not None
    layers: Any = driver.worker._runner._forward.model.attention_layers
    assert [layer.kv_scales.tolist() for layer in layers] == [[[1.0], [1.0]], [[0.25], [0.5]]]
    check_logits(directory)  # a plain cache does without them


@pytest.mark.parametrize(
    ("leaf", "make", "message"),
    [
        ("scales", None, "lacks model.layers.0.mlp.down_proj.scales"),
        ("scales", lambda x: x[1:], r"down_proj.scales .* \[2, 64\], the model expects \[3, 64\]"),
        ("qweight", lambda x: x[1:], r"down_proj.qweight .* \[11, 64\], the model expects \[12, 64\]"),
        ("qzeros", lambda x: x.short(), r"down_proj.qzeros .* holds int16, the model expects int32"),
        ("g_idx", lambda x: x + 1, r"down_proj.g_idx names no group for each of 96 inputs"),
        ("g_idx", None, r"lacks model.layers.0.mlp.down_proj.g_idx, the order of its inputs"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, leaf: str, make: Any, message: str) -> None:
    scheme = {**SCHEME, "desc_act": make is None and leaf == "g_idx"}
    directory = write(tiny_model("llama", intermediate_size=96), tmp_path, gptq(), scheme)
    change(directory, f"model.layers.0.mlp.down_proj.{leaf}", make)
    with pytest.raises(CheckpointError, match=message):
        Driver(str(directory), num_blocks=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_format": "marlin"}, "checkpoint_format=marlin"),
        ({"is_marlin_format": True}, "checkpoint_format=marlin"),
        ({"bits": 5}, "bits=5; known: 2, 3, 4, 8"),
        ({"group_size": 0}, "group_size=0"),
    ],
)
def test_other_forms_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        select_quantization(None, {**SCHEME, **changes}, torch.device("cpu"), torch.float32)
