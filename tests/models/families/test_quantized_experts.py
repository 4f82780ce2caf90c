"""Experts of quantized checkpoints, whole or over ranks: against transformers with the weights that were stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.backends import QUANT_METHODS
from app.kernels.moe.stacked import StackedExperts
from app.layers.experts.expert_mlp import Experts
from app.layers.replicated import ReplicatedLinear
from tests.loading.load_formats.formats import contexts, fill
from tests.loading.test_quantized_modules import HEADS, PROMPT, check_logits, quantized
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.quantization.checkpoints import check_stored
from tests.quantization.stored_forms import FORMS, PLAIN_FORMS
from tests.quantization.test_fp8 import round_linear_layers, rounded
from tests.quantization.test_mxfp4 import numbers
from tests.tiny_models import hf_model, tiny_model
from tests.worker.worker_driver import Driver, all_logits

WIDTHS = {"moe_intermediate_size": 40}


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUANT_METHODS._table, "nibbles", "tests.loading.test_quantized_modules:Nibbles")


def experts(driver: Any) -> list[Experts]:
    return [module for module in driver.worker._parts.model.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize("name", ["qwen2_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    family, changes = EXPERT_VARIANTS[name]
    source = tiny_model(family, **{**changes, **WIDTHS})
    directory = quantized(source, tmp_path / "model", linear=r"(_proj|\.w[123]|gate)\.weight$")
    driver = check_logits(directory)
    gates = [layer for layer in driver.worker._parts.model.modules() if isinstance(layer, ReplicatedLinear)]
    assert [layer.stored.is_plain for layer in gates] == [False] * (4 if name == "qwen2_moe" else 2)
    assert all(layer.gate_up_proj.packed is not None for layer in experts(driver))
    assert all(layer.gate_up_proj.weight.is_meta for layer in experts(driver) if hasattr(layer.gate_up_proj, "weight"))


MIXTURES = ["bnb-nf4-nested"]
IN_MORE_FORMS = [name for name in FORMS if name not in (*MIXTURES, "modelopt-mixed")]


@pytest.mark.parametrize("form", [*MIXTURES, *(pytest.param(name, marks=pytest.mark.slow) for name in IN_MORE_FORMS)])
def test_experts_are_read_in_every_form(form: str, tmp_path: Path) -> None:
    sizes = {**HEADS, "intermediate_size": 128, **FORMS[form].sizes, "initializer_range": 0.1}
    check_stored(FORMS[form].write(tiny_model("mixtral", **sizes, num_local_experts=3), tmp_path))


def test_experts_of_one_layer_may_be_quantized_in_unlike_ways(tmp_path: Path) -> None:
    """One in groups of another size; one, and a part of another, as plain weights."""
    family, changes = EXPERT_VARIANTS["qwen3_moe"]
    unlike = {"coarse": [r"experts\.3\."], "skipped": [r"experts\.4\.", r"experts\.2\.up"]}
    driver = check_logits(quantized(tiny_model(family, **changes), tmp_path / "model", **unlike))
    assert all(isinstance(layer.gate_up_proj.packed, torch.Tensor) for layer in experts(driver))


@pytest.mark.parametrize(("tp", "whole"), [(2, False), (4, False), (2, True)])
def test_ranks_hold_the_share_of_what_is_stored(tp: int, whole: bool, tmp_path: Path) -> None:
    """Shares of 40 outputs and inputs begin within groups of 16."""
    family, changes = EXPERT_VARIANTS["qwen3_moe"]
    directory = quantized(tiny_model(family, **{**changes, **HEADS, **WIDTHS}), tmp_path / "model")
    stored = load_file(tmp_path / "judge" / "model.safetensors")
    seen = []
    for rank, ctx in enumerate(contexts(directory, tp, enable_expert_parallel=whole)):
        layer: Experts = fill(directory, ctx=ctx).model.layers["1"].mlp.experts
        width = 40 if whole else 40 // tp
        own = slice(0, 40) if whole else slice(rank * width, rank * width + width)
        for part in (layer.gate_up_proj, layer.down_proj):
            part.pack()
        for expert, slot in layer.gate_up_proj.slots.items():
            name = f"model.layers.1.mlp.experts.{expert}"
            gate, up, down = (stored[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            torch.testing.assert_close(layer.gate_up_proj.multiplier[slot], torch.cat((gate[own], up[own])))
            torch.testing.assert_close(layer.down_proj.multiplier[slot], down[:, own])
            seen.append(expert)
    assert sorted(seen) == sorted(list(range(7)) * (1 if whole else tp))


@pytest.mark.parametrize("width", [96, 72])
def test_blocks_of_fp8_beside_latent_attention(width: int, tmp_path: Path) -> None:
    """DeepSeek's form; of 72 outputs and inputs the last are no whole blocks of 32 and of 16."""
    family, changes = EXPERT_VARIANTS["deepseek_v3"]
    source = tiny_model(family, **{**changes, "moe_intermediate_size": width})
    driver = Driver(str(PLAIN_FORMS["fp8-block"].write(source, tmp_path)), num_blocks=16)
    stored = load_file(tmp_path / "judge" / "model.safetensors")
    for number, layer in enumerate(experts(driver), start=1):  # the first layer has none
        assert isinstance(layer.gate_up_proj.packed, StackedExperts) == (width == 96)
        gate_up, down = numbers(layer.gate_up_proj), numbers(layer.down_proj)
        for expert in range(changes["n_routed_experts"]):
            name = f"model.layers.{number}.mlp.experts.{expert}"
            gate, up, back = (stored[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            torch.testing.assert_close(gate_up[expert], torch.cat((gate, up)), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(down[expert], back, rtol=1e-5, atol=1e-6)


def test_experts_are_rounded_to_fp8_while_loading() -> None:
    """Their weights alone: a CPU's kernels multiply what is left of them."""
    family, changes = EXPERT_VARIANTS["qwen3_moe"]
    directory = tiny_model(family, **changes)
    judge = hf_model(directory)
    round_linear_layers(judge)
    for name, parameter in judge.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parameter.data = rounded(parameter.data)
    driver = Driver(str(directory), num_blocks=16, quantization="fp8")
    assert all(isinstance(layer.down_proj.packed, StackedExperts) for layer in experts(driver))
    with torch.inference_mode():
        expected = judge(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(driver, PROMPT), expected, rtol=0, atol=2e-3)
