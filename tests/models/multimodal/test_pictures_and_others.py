"""Pictures in prompts beside what else a request or an engine may bring: a grammar, an adapter, caches of 8 bits.
Judged by transformers, and by PEFT for adapters."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from app.records.media import MediaItem
from app.records.sampling_params import SamplingParams
from tests.adapters import peft_adapter
from tests.chatting_media import chatting_media_model
from tests.engine.core_driver import assert_idle, run
from tests.engine.test_pictures import PARTS, TOKENS, core_of, request
from tests.tiny_media import IMAGE, MODELS, media_judge, prompt_of, tiny_media_model
from tests.worker.lora.test_adapters import adapting, load
from tests.worker.worker_driver import Driver, all_logits

NAMES = ("qwen3_vl", "llava", "cohere2_vision")


def logits_of(name: str, tokens: list[int], items: tuple[MediaItem, ...], model: Any = None) -> torch.Tensor:
    """transformers', with another model of the family or its own."""
    ids = torch.tensor([tokens])
    types = {MODELS[name].types: (ids == IMAGE).long()} if MODELS[name].types else {}
    seen = MODELS[name].judge(items) if items else {}
    own = model or media_judge(tiny_media_model(name))
    with torch.inference_mode():
        logits: torch.Tensor = own(input_ids=ids, **seen, **types, use_cache=False).logits[0]
    return logits


def test_a_grammar(tmp_path: Path) -> None:
    """Greedy among what it lets through: digits."""
    directory = chatting_media_model("qwen3_vl", tmp_path / "m")
    own = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    digits: list[Any] = [own.token_to_id(digit) for digit in string.digits]
    grammar = {"regex": f"[0-9]{{{TOKENS}}}"}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, seed=0, structured_outputs=grammar)
    prompts = [prompt_of("qwen3_vl", parts) for parts in PARTS[:3]]
    core = core_of(str(directory), max_num_batched_tokens=24)
    results = run(core, [replace(request(i, *prompt), work=params) for i, prompt in enumerate(prompts)])
    for i, (tokens, ask) in enumerate(prompts):
        said: list[int] = []
        for _ in range(TOKENS):
            last = logits_of("qwen3_vl", [*tokens, *said], ask.items)[-1]
            said.append(max(digits, key=lambda token: float(last[token])))
        assert results.tokens[f"r{i}"][:TOKENS] == said
    assert_idle(core)
    core.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    config: dict[str, Any] = {
        "r": 4,
        "target_modules": r".*language_model.*layers\.\d+\.(self_attn\.[qv]_proj|mlp\.up_proj)",
    }
    base = media_judge.__wrapped__
    adapter = peft_adapter(tiny_media_model(name), tmp_path / "a", base=base(tiny_media_model(name)), **config)
    tokens, ask = prompt_of(name, [[5, 6, 7], (8, 6, 1), [8, 9], (4, 4, 2), [10]])
    driver = adapting(tiny_media_model(name), chunk=7, max_model_len=256)
    own = all_logits(driver, tokens, ask, load(driver, adapter))
    driver.worker.shutdown()
    adapted = PeftModel.from_pretrained(base(tiny_media_model(name)), adapter).eval()
    truth = logits_of(name, tokens, ask.items, adapted)
    torch.testing.assert_close(own, truth, atol=2e-3, rtol=1e-3)
    assert (truth - logits_of(name, tokens, ask.items)).abs().max() > 1e-2, "the adapter does nothing"


@pytest.mark.parametrize(("kind", "bound"), [("fp8", 0.15), ("int8_per_token_head", 0.05)])
def test_caches_of_8_bits(kind: str, bound: float) -> None:
    """What rounding of keys and values costs the logits, which are some 1.7 from their middle."""
    options = {"chunk": 7, "max_model_len": 256, "num_blocks": 64, "kv_cache_dtype": kind}
    driver = Driver(str(tiny_media_model("qwen3_vl")), **options)
    for parts in PARTS:
        tokens, ask = prompt_of("qwen3_vl", parts)
        far = (all_logits(driver, tokens, ask) - logits_of("qwen3_vl", tokens, ask.items)).abs().mean()
        assert 1e-4 < far < bound
    driver.worker.shutdown()
