"""Doge with experts; transformers' code, fed token by token, is the judge: of a prompt in one piece it gives tokens the
scores of others (families/doge.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.doge.modeling_doge import DogeCDMoE

from app.errors import UnsupportedError
from app.layers.experts import row_experts
from tests.hf_logprobs import prompts
from tests.models.families.test_families_in_parallel import HEADS, LAYOUTS, run_layout
from tests.tiny_models import hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, all_logits, greedy

MOE = {"is_moe": True, "num_experts": 64, "num_experts_per_tok": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "few": MOE,
    "many": {**MOE, "num_experts": 30, "num_experts_per_tok": 11, "norm_topk_prob": True, "mlp_bias": True},
}


@pytest.fixture(autouse=True)
def _output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' layer (5.17) adds what its experts give to the residual, though they give their scores, too."""
    given = DogeCDMoE.forward
    monkeypatch.setattr(DogeCDMoE, "forward", lambda layer, x, **more: given(layer, x, **more)[0])


def stepped(judge: PreTrainedModel, prompt: list[int], more: int = 0) -> tuple[torch.Tensor, list[int]]:
    """Logits of tokens that come one by one, and so many greedy ones behind them."""
    cache, logits, tokens = None, [], list(prompt)
    with torch.inference_mode():
        for i in range(len(prompt) + more):
            out = judge(torch.tensor([[tokens[i]]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[0, -1])
            if i >= len(prompt) - 1:
                tokens.append(int(logits[-1].argmax()))
    return torch.stack(logits), tokens[len(prompt) : len(prompt) + more]


@pytest.mark.parametrize("name", list(VARIANTS))
@pytest.mark.parametrize("rows_bytes", [row_experts.MAX_ROWS_BYTES, 4096])
def test_tokens_and_logits(name: str, rows_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever share of the experts' rows is gathered at a time."""
    monkeypatch.setattr(row_experts, "MAX_ROWS_BYTES", rows_bytes)
    directory = tiny_model("doge", **VARIANTS[name])
    judge, asked = hf_model(directory), prompts((3, 16, 37))
    driver = Driver(str(directory), chunk=20, max_model_len=64)
    runs = driver.run([Run(prompt, greedy(6)) for prompt in asked])
    assert [run.tokens for run in runs] == [stepped(judge, prompt, 6)[1] for prompt in asked]
    assert (all_logits(driver, asked[-1]) - stepped(judge, asked[-1])[0]).abs().max() < 1e-3


@pytest.mark.parametrize(
    "layout", [name if name == "tp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_over_two_ranks(layout: str) -> None:
    directory = tiny_model("doge", **{**VARIANTS["many"], **HEADS})
    judge = hf_model(directory)
    run_layout(directory, LAYOUTS[layout], lambda prompt: stepped(judge, prompt, 8)[1])


def test_more_experts_than_there_are() -> None:
    directory = tiny_model("doge", **MOE)
    with pytest.raises(UnsupportedError, match="num_experts_per_tok=65 of 64 experts"):
        Driver(str(directory), hf_overrides={"num_experts_per_tok": 65})
