"""Checkpoints in blocks of fp8, as DeepSeek's are: every matrix of latent attention is quantized, `kv_b_proj` too,
whose blocks are dequantized at load. The judge is transformers with these weights and activations rounded from outside:
its own loader (5.17) takes no rows that end within a block."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from app.layers.latent_attention import LatentAttention
from app.layers.linear import Linear
from tests.hf_logprobs import prompts
from tests.kernels.gemm.test_fp8 import nearest_e4m3
from tests.models.families.expert_variants import LATENT
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

BLOCK = 16  # 72 rows of kv_a_proj_with_mqa are 5 rows of scales, as 576 are of blocks of 128
MODELS: dict[str, dict[str, Any]] = {"low-rank": LATENT, "one-product": {**LATENT, "q_lora_rank": None}}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK], "symmetric": True}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True, "dynamic": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}
# name: (what config.json says, the name of scales)
SCHEMES: dict[str, tuple[dict[str, Any], str]] = {
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"]},
        "weight_scale",
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"},
        "weight_scale_inv",
    ),
}


def blocks_of(x: torch.Tensor) -> torch.Tensor:
    """x [N, K], padded, as [blocks of rows, rows, blocks of columns, columns]."""
    rows, columns = x.shape
    padded = F.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def matrix(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    return blocks.flatten(2).flatten(0, 1)[: like.shape[0], : like.shape[1]]


@functools.cache
def quantized(name: str, kind: str) -> Path:
    plain = tiny_model("youtu", **MODELS[name])
    copy = Path(shutil.copytree(plain, plain.with_name(f"{plain.name}-{kind}")))
    tensors, (scheme, leaf) = load_file(copy / "model.safetensors"), SCHEMES[kind]
    for weight in [weight for weight in tensors if weight.endswith(("_proj.weight", "mqa.weight"))]:
        blocks = blocks_of(tensors[weight])
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        tensors[weight] = matrix(blocks / scale[:, None, :, None], tensors[weight]).to(torch.float8_e4m3fn)
        tensors[weight.removesuffix("weight") + leaf] = scale
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    return copy


def judge(name: str, kind: str, *, rounds: bool) -> PreTrainedModel:
    """`rounds`: what linear layers read is rounded in blocks, but for `kv_b_proj`."""

    def round_input(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[torch.Tensor]:
        x = arguments[0]
        blocks = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        scale = (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
        rounded = torch.from_numpy(nearest_e4m3((blocks / scale).double().numpy())).float() * scale
        return (rounded.flatten(-2)[..., : x.shape[-1]],)

    model, tensors = (
        hf_model(tiny_model("youtu", **MODELS[name])),
        load_file(quantized(name, kind) / "model.safetensors"),
    )
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or path == "lm_head":
            continue
        weight, scale = tensors[f"{path}.weight"].float(), tensors[f"{path}.{SCHEMES[kind][1]}"]
        module.weight.data = matrix(blocks_of(weight) * scale[:, None, :, None], weight)
        if rounds and not path.endswith("kv_b_proj"):
            module.register_forward_pre_hook(round_input)
    return model


@pytest.mark.parametrize("kind", list(SCHEMES))
@pytest.mark.parametrize("name", list(MODELS))
def test_every_projection_is_what_the_checkpoint_says(name: str, kind: str) -> None:
    driver, model = Driver(str(quantized(name, kind)), max_model_len=128), judge(name, kind, rounds=False)
    assert driver.worker._parts is not None
    for ours, theirs in zip(driver.worker._parts.model.attention_layers, model.model.layers, strict=True):
        assert isinstance(ours, LatentAttention)
        attn = theirs.self_attn
        first = attn.q_proj if attn.q_lora_rank is None else attn.q_a_proj
        both = torch.cat((first.weight, attn.kv_a_proj_with_mqa.weight))
        torch.testing.assert_close(of_ones(ours.input_proj), both)
        torch.testing.assert_close(of_ones(ours.o_proj), attn.o_proj.weight.data)
        torch.testing.assert_close(ours.kv_b_proj.heads.flatten(0, 1), attn.kv_b_proj.weight.data)


@torch.inference_mode()
def of_ones(linear: Linear) -> torch.Tensor:
    """The weight, as the product with ones makes it, which no rounding of activations changes."""
    weight: torch.Tensor = linear(torch.eye(linear.input_share.size)).t().contiguous()
    return weight


@pytest.mark.parametrize("kind", list(SCHEMES))
def test_tokens_equal_transformers(kind: str) -> None:
    driver, asked = Driver(str(quantized("low-rank", kind)), chunk=40, max_model_len=128), prompts((3, 16, 37, 70))
    assert driver.worker._parts is not None
    linear = driver.worker._parts.model.attention_layers[0].get_submodule("o_proj")
    assert isinstance(linear, Linear)
    x = torch.randn(1, linear.input_share.size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():  # whether the kernel of these weights rounds what it reads
        rounds = not torch.allclose(linear(x), x @ of_ones(linear).t(), atol=1e-5)
    model = judge("low-rank", kind, rounds=rounds)
    found = [run.tokens for run in driver.run([Run(prompt, greedy(8)) for prompt in asked])]
    assert found == [hf_greedy(model, prompt, 8) for prompt in asked]
