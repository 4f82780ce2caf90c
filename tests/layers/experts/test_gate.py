"""In bf16 a gate chooses and weighs as transformers' router of the family: logits and weights are rounded where its
are. In fp32, where other judges compute, these roundings are none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.layers.context import ForwardContext
from app.layers.experts.gate import Gate
from tests.loading.load_formats.formats import contexts, fill
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model

TOKENS = 200
# Where the router alone does not choose: what does, of the block that holds it. MiniMax's correction is rounded there,
# here it is as in the other families.
CHOOSERS: dict[str, Callable[[Any, Gate, torch.Tensor], Any]] = {
    "minimax_m2": lambda block, gate, x: block.gate(x, gate.e_score_correction_bias),
    "hy_v3": lambda block, gate, x: block.gate(x, gate.e_score_correction_bias),
    "dbrx": lambda block, gate, x: block.route_tokens_to_experts(block.router(x)),
    "hunyuan_v1_moe": lambda block, gate, x: block.gate(x),
}
TOLERANCES = {"dbrx": 2.0**-7}  # all shares are rounded there, before those of the chosen are made to sum to 1
TWINS = ("granitemoeshared", "glm4_moe_lite", "qwen3_moe")  # whose rule another family has


def dense(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, E], 0 where an expert is not chosen."""
    return torch.zeros(len(ids), num_experts).scatter_(1, ids.long(), weights.float())


def judged(judge: Any, family: str, gate: Gate, x: torch.Tensor) -> torch.Tensor:
    """The same of what transformers' router gives: numbers of experts and their weights, or a score for each."""
    num_experts = len(gate.multiplier)
    if family in CHOOSERS:
        given = CHOOSERS[family](next(module for module in judge.modules() if hasattr(module, "experts")), gate, x)
    else:
        given = next(one for one in judge.modules() if type(one).__name__.lower().endswith("router"))(x)
    ids = next((one for one in given if not one.is_floating_point()), None)
    if ids is None:  # Llama 4
        return cast("torch.Tensor", given[0].float())
    weights = next(one for one in given if one.is_floating_point() and one.shape == ids.shape)
    return dense(ids, weights, num_experts)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if "-" in x or x in TWINS else ()) for x in EXPERT_VARIANTS]
)
def test_in_bf16_as_the_router_of_transformers(name: str) -> None:
    family, changes = EXPERT_VARIANTS[name]
    directory = tiny_model(family, **{**changes, "initializer_range": 0.5})
    judge = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    (ctx,) = contexts(directory, dtype="bfloat16")
    gate = next(module for module in fill(directory, ctx=ctx).modules() if isinstance(module, Gate))
    x = torch.randn(TOKENS, gate.multiplier.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    step = cast("ForwardContext", SimpleNamespace(slot_mapping=torch.arange(TOKENS)))
    with torch.inference_mode():
        expected = judged(judge, family, gate, x)
        found = gate.choose(x, step)
    chosen = found.ids[:, : gate.rule.top_k], found.weights[:, : gate.rule.top_k]
    logits = torch.nn.functional.linear(x.to(gate.multiplier.dtype), gate.multiplier, gate.bias).float()
    differ = (logits.sort().values.diff() > 0).all(1)  # whom a tie gives to, neither says
    assert differ.sum() > TOKENS / 2
    found_dense = dense(*chosen, len(gate.multiplier))[differ]
    torch.testing.assert_close(found_dense, expected[differ], rtol=TOLERANCES.get(family, 1e-4), atol=1e-6)
