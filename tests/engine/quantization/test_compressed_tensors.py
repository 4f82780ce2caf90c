"""Checkpoints in FP8-dynamic form, against transformers with the same weights and activations rounded from outside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.engine.quantization import select_quantization
from app.errors import UnsupportedError
from tests.engine.quantization.test_fp8 import round_linear_layers
from tests.engine.worker_driver import Driver, Run, greedy
from tests.tiny_models import hf_greedy, hf_model, tiny_model

WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS, "output_activations": None}
SCHEME = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"]}
PROMPTS = [[5, 9, 200, 31], list(range(40, 60))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with e4m3 weights and their scales."""
    copy = Path(shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("fp8") / "model"))
    tensors = load_file(copy / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        tensors[name + "_scale"] = scale
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    save_file(tensors, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": SCHEME}))
    return copy


def test_tokens_equal_transformers_with_rounded_layers(directory: Path) -> None:
    judge = hf_model(tiny_model("llama"))
    round_linear_layers(judge)
    driver = Driver(str(directory), num_blocks=16)
    assert "quantization: compressed-tensors (linear layers, as in the checkpoint)" in driver.info.notes
    found = driver.run([Run(prompt, greedy(12)) for prompt in PROMPTS])
    assert [run.tokens for run in found] == [hf_greedy(judge, prompt, 12) for prompt in PROMPTS]


def test_dummy_weights_of_its_types(directory: Path) -> None:
    driver = Driver(str(directory), num_blocks=16, load_format="dummy")
    assert len(driver.run([Run(PROMPTS[0], greedy(3))])[0].tokens) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_groups": {"a": GROUP, "b": GROUP}}, "layers quantized in unlike ways"),
        (
            {"config_groups": {"a": {**GROUP, "weights": {**WEIGHTS, "strategy": "block"}}}},
            "weights with strategy='block'",
        ),
        ({"config_groups": {"a": {**GROUP, "input_activations": None}}}, "input_activations with num_bits=None"),
        ({"ignore": ["lm_head", "model.layers.0.mlp.down_proj"]}, "some linear layers left as they were"),
    ],
)
def test_other_forms_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        select_quantization(None, {**SCHEME, **changes}, torch.device("cpu"), torch.float32)
