"""Greedy answers with drafts are those of transformers' own speculative decoding: assisted, and by prompt lookup."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_models import hf_model, tiny_model
from tests.worker.spec_decode.test_chain import COUNT, MAX_TOKENS, SHAPE, config_of, prompts, run_greedy


@pytest.fixture(scope="module")
def assistant() -> Path:
    return tiny_model("llama", seed=4, **SHAPE)


def generated(target: PreTrainedModel, prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = cast("Any", target).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None,
            pad_token_id=0, **options,
        )  # fmt: skip
    return [int(token) for token in found[0, len(prompt) :]]


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_answers_are_those_of_transformers(assistant: Path, method: str) -> None:
    model = tiny_model("llama", **SHAPE)
    asked = [prompt * 2 for prompt in prompts()[1:3]]
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": COUNT}
    if method == "draft_model":
        speculation["model"] = str(assistant)
        options: dict[str, Any] = {"assistant_model": hf_model(assistant)}
    else:
        speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
        options = {"prompt_lookup_num_tokens": COUNT, "max_matching_ngram_size": 2}
    answers, spy = run_greedy(config_of(model, speculation), asked=asked)
    assert spy.seen
    assert answers == [generated(hf_model(model), prompt, **options) for prompt in asked]
