"""Scales of a KV cache in a checkpoint: the names in use, ranks' shares, what is wrong is named."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.errors import CheckpointError, UnsupportedError
from app.kernels.attention import KV_FP8
from app.layers.context import BuildContext
from app.loading.loader import load_model
from app.models.decoder import CausalLM
from app.quantization import select_quantization
from app.worker.attention.backend import select_attention
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
FIRST = "model.layers.0.self_attn"
KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A model of 4 KV heads that the test may change."""
    directory = tiny_model("llama", num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    return Path(shutil.copytree(directory, tmp_path / "model"))


def load(
    directory: Path, *, rank: int = 0, ranks: int = 1, kv_dtype: torch.dtype | None = KV_FP8, impl: Any = "auto"
) -> CausalLM:
    tp = RankGroup(rank, ranks, cast("Any", object()) if ranks > 1 else None)
    groups = ParallelGroups(tp=tp)
    info = replace(ModelInfo.from_directory(str(directory)), impl=impl)
    method, _ = select_quantization(None, info.hf_config.get("quantization_config") or {}, CPU, torch.float32)
    ops = select_attention("torch", CPU)[0]
    ctx = BuildContext(torch.float32, CPU, 64, ops, groups, quantization=method, kv_dtype=kv_dtype)
    return load_model(info, ctx, "safetensors", 0)


def add(directory: Path, **tensors: torch.Tensor) -> None:
    path = directory / "model.safetensors"
    save_file({**load_file(path), **{name: x.clone() for name, x in tensors.items()}}, path)


def scales(model: CausalLM, layer: int = 0) -> list[list[float]]:
    found = model.attention_layers[layer].kv_scales
    assert found is not None
    assert found.dtype == torch.float32
    return cast("list[list[float]]", found.tolist())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_names(copy: Path, key: str, value: str, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 0.25, dtype=torch.bfloat16)
    add(copy, **{f"{FIRST}.{key}": x, f"{FIRST}.{value}": 2 * x, f"{FIRST}.attn.q_scale": x, f"{FIRST}.prob_scale": x})
    model = load(copy)
    assert scales(model) == [[0.25] * 4, [0.5] * 4]
    assert scales(model, 1) == [[1.0] * 4] * 2
    assert load(copy, kv_dtype=None).attention_layers[0].kv_scales is None


def test_one_for_both_and_a_closer_one(copy: Path) -> None:
    add(copy, **{f"{FIRST}.kv_scale": torch.tensor(0.5), f"{FIRST}.v_scale": torch.tensor([0.125])})
    assert scales(load(copy)) == [[0.5] * 4, [0.125] * 4]


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_ranks_take_their_heads(copy: Path, impl: str) -> None:
    add(copy, **{f"{FIRST}.k_scale": torch.arange(1.0, 5.0).view(4, 1, 1), f"{FIRST}.v_scale": torch.arange(5.0, 9.0)})
    assert scales(load(copy, impl=impl)) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    found = [scales(load(copy, rank=rank, ranks=2, impl=impl)) for rank in range(2)]
    assert found == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]


def test_ranks_share_a_head(tmp_path: Path) -> None:
    plain = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    directory = Path(shutil.copytree(plain, tmp_path / "model"))
    add(directory, **{f"{FIRST}.k_scale": torch.tensor([2.0, 3.0])})
    found = [scales(load(directory, rank=rank, ranks=4))[0] for rank in range(4)]
    assert found == [[2.0], [2.0], [3.0], [3.0]]


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"self_attn\.k_scale in .* has shape \[3\], not one number or one for each of 4 KV heads"),
        (torch.tensor(0.0), r"k_scale in .* is no scale: it must be above 0"),
        (torch.tensor(float("nan")), r"k_scale in .* is no scale"),
    ],
)
def test_what_is_no_scale_is_named(copy: Path, scale: torch.Tensor, message: str) -> None:
    add(copy, **{f"{FIRST}.k_scale": scale})
    with pytest.raises(CheckpointError, match=message):
        load(copy)
    load(copy, kv_dtype=None)


def test_a_scale_of_no_layer_is_unexpected(copy: Path) -> None:
    add(copy, **{"model.layers.7.self_attn.k_scale": torch.tensor(1.0)})
    with pytest.raises(CheckpointError, match=r"unexpected model\.layers\.7\.self_attn\.k_scale"):
        load(copy)


def test_checkpoints_whose_cache_alone_is_quantized(copy: Path) -> None:
    add(copy, **{f"{FIRST}.k_scale": torch.tensor(0.5)})
    config = json.loads((copy / "config.json").read_text())

    def given(**changes: Any) -> CausalLM:
        (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {**KV_ONLY, **changes}}))
        return load(copy)

    assert scales(given())[0] == [0.5] * 4
    with pytest.raises(UnsupportedError, match="kv_cache_scheme"):
        given(kv_cache_scheme={"num_bits": 8, "type": "int"})
    with pytest.raises(UnsupportedError, match="group_0: activations are quantized, and no weights"):
        given(config_groups={"group_0": {}})
