"""Sounds in prompts beside what else a request may bring: drafts, a grammar, an adapter, an answer begun elsewhere.
Judged by transformers, and by PEFT for adapters."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.records.sampling_params import SamplingParams
from tests.adapters import peft_adapter
from tests.api.openai.audio.listening_chat import write_listener
from tests.engine.core_driver import assert_idle, run
from tests.engine.test_pictures import core_of, request
from tests.tiny_hearing import TOKENS, hearing_model, judge_of, judged, prompt_of, prompts_of, told
from tests.worker.lora.test_adapters import adapting, load
from tests.worker.worker_driver import all_logits

NAMES = ("voxtral", "qwen3_asr", "qwen2_5_omni")
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}


def requests_of(name: str) -> list[Any]:
    return [request(i, *prompt_of(name, parts)) for i, parts in enumerate(prompts_of(name))]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_and_answers_that_were_begun_elsewhere(name: str) -> None:
    asked = requests_of(name)
    expected = [judged(name, index)[1] for index in range(len(asked))]
    core = core_of(str(hearing_model(name)), max_num_batched_tokens=24, **DRAFTS)
    for begun in (0, 1, 3):
        again = [replace(one, output_token_ids=own[:begun]) for one, own in zip(asked, expected, strict=True)]
        results = run(core, again)
        assert [results.tokens[one.request_id] for one in asked] == [own[begun:] for own in expected]
    assert_idle(core)
    core.shutdown()


def test_a_grammar(tmp_path: Path) -> None:
    """Greedy among what it lets through: digits."""
    directory = write_listener(tmp_path / "voxtral", "voxtral", ["<s>"], are_special=True)
    core = core_of(str(directory), max_num_batched_tokens=24)
    tokenizer_ids = [_id_of(directory, digit) for digit in string.digits]
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, seed=0, structured_outputs={"regex": f"[0-9]{{{TOKENS}}}"}
    )
    asked = [replace(one, work=params) for one in requests_of("voxtral")]
    results = run(core, asked)
    for index, one in enumerate(asked):
        tokens, ask = prompt_of("voxtral", prompts_of("voxtral")[index])
        said: list[int] = []
        for _ in range(TOKENS):
            logits = _logits("voxtral", [*tokens, *said], ask.items)[-1]
            said.append(max(tokenizer_ids, key=lambda token: float(logits[token])))
        assert results.tokens[one.request_id][:TOKENS] == said
    assert_idle(core)
    core.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    config: dict[str, Any] = {"r": 4, "target_modules": r".*layers\.\d+\.(self_attn\.[qv]_proj|mlp\.up_proj)"}
    config["exclude_modules"] = r".*(tower|visual).*"
    adapter = peft_adapter(hearing_model(name), tmp_path / "adapter", base=judge_of.__wrapped__(name), **config)
    tokens, ask = prompt_of(name, prompts_of(name)[0])
    driver = adapting(hearing_model(name), chunk=7, max_model_len=256)
    own = all_logits(driver, tokens, ask, load(driver, adapter))
    driver.worker.shutdown()
    adapted = PeftModel.from_pretrained(judge_of.__wrapped__(name), adapter).eval()
    truth = _logits(name, tokens, ask.items, adapted)
    torch.testing.assert_close(own, truth, atol=2e-3, rtol=1e-3)
    assert (truth - _logits(name, tokens, ask.items)).abs().max() > 1e-2, "the adapter does nothing"


def _logits(name: str, tokens: list[int], items: Any, model: Any = None) -> torch.Tensor:
    ids = torch.tensor([tokens])
    options = {"attention_mask": torch.ones_like(ids), "use_cache": False, **told(name, items)}
    with torch.inference_mode():
        logits: torch.Tensor = (model or judge_of(name))(input_ids=ids, **options).logits[0]
    return logits


def _id_of(directory: Path, letter: str) -> int:
    import tokenizers

    found = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(letter)
    assert found is not None
    return int(found)
