"""Weights rounded while they are loaded: no number further from its own than half a step, and a whole model runs."""

from __future__ import annotations

import pytest
import torch

from app.quantization.rounding import to_fp8_blocks, to_int4_groups, to_int8_rows
from tests.quantization.checkpoints import HEADS, PROMPT
from tests.tiny_models import hf_model, tiny_model
from tests.worker.worker_driver import Driver, all_logits


@pytest.mark.parametrize("shape", [(5, 300), (130, 128), (1, 1)])
def test_numbers_are_the_nearest(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    int8 = to_int8_rows(weight)
    assert ((int8.dequantize() - weight).abs() <= int8.scale / 2 + 1e-7).all()
    int4 = to_int4_groups(weight, 128)
    steps = int4.scale.repeat_interleave(128, 1)[:, : shape[1]]
    inside = weight < 7.5 * steps - 1e-6  # the largest positive number may be cut by half a step
    assert ((int4.dequantize() - weight).abs() <= steps / 2 + 1e-6)[inside].all()
    fp8 = to_fp8_blocks(weight, (128, 128))
    assert fp8.scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert ((fp8.dequantize() - weight).abs() <= weight.abs() / 16 + fp8.scale.max() * 2**-10).all()


def test_zeros_stay_zeros() -> None:
    for form in (to_int8_rows(torch.zeros(2, 3)), to_int4_groups(torch.zeros(2, 3), 128)):
        assert not form.dequantize().any()


def round_layers(judge: torch.nn.Module, name: str) -> None:
    """In plain steps: rows; blocks, each of which holds all of a fused layer; groups that hold all of a row."""
    for block in judge.modules():
        children = dict(block.named_children())
        for parts in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
            weights = [children[part].weight for part in parts if part in children]
            whole = max((float(weight.abs().amax()) for weight in weights), default=0.0)
            for weight in weights:
                scale = weight.abs().amax(1, keepdim=True) / (127 if name == "int8" else 7.5)
                if name == "fp8_block":
                    weight.copy_((weight / (whole / 448)).to(torch.float8_e4m3fn).float() * (whole / 448))
                else:
                    codes = (weight / scale).round()
                    weight.copy_((codes if name == "int8" else codes.clamp(-8, 7)) * scale)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.1), ("fp8_block", 0.3), ("w4", 1e-4)])
def test_a_model_in_each(name: str, most: float) -> None:
    """Relative distance of the logits from those of transformers with rounded weights; activations are rounded too, but
    for w4."""
    source = tiny_model("llama", head_dim=16, intermediate_size=64, **HEADS)
    judge = hf_model(source)
    driver = Driver(str(source), num_blocks=16, quantization=name)
    assert f"quantization: {name} (linear layers)" in driver.info.notes
    found = all_logits(driver, PROMPT)
    with torch.inference_mode():
        plain = judge(torch.tensor([PROMPT])).logits[0]
        round_layers(judge, name)
        expected = judge(torch.tensor([PROMPT])).logits[0]
    assert (found - expected).norm() / expected.norm() < most
    assert (plain - expected).norm() / expected.norm() > 1e-3, "the rounding should show"
