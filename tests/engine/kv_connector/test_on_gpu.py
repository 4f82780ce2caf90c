"""The host tier on a real GPU: copies over CUDA streams give the same tokens, also beside others and when preempted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from app import LLM, SamplingParams
from benchmarks.serve_process import ROOT
from tests.engine.core_driver import assert_idle, make_request, run
from tests.tiny_models import hf_greedy, hf_model, tiny_model

pytestmark = pytest.mark.gpu

TINY_CHAT = str(ROOT / "app/assets/tiny-chat")
HOST = {"kv_host_memory_bytes": 64 << 20}


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def _engine(**options: Any) -> LLM:
    common: dict[str, Any] = {"dtype": "float32", "gpu_memory_utilization": 0.2, "max_num_seqs": 16, "block_size": 16}
    return LLM(str(tiny_model("llama")), tokenizer=TINY_CHAT, **{**common, **options})


def _prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 331) for _ in range(length + i)] for i in range(count)]


def test_restored_prefixes_give_transformers_tokens() -> None:
    prompts = _prompts(5, 200)
    model = hf_model(tiny_model("llama"))
    expected = [hf_greedy(model, prompt, 8) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with _engine(num_blocks=20, **HOST) as llm:
        assert any("pinned" in note for note in llm.worker_info.notes)
        for attempt in range(3):
            outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert all((output.num_cached_tokens or 0) >= 192 for output in outputs) == (attempt > 0)


@pytest.mark.parametrize("inflight", [1, 2, 4])
def test_loads_beside_decodes_preemptions_and_aborts_change_no_token(inflight: int) -> None:
    rng = random.Random(4)
    prefixes = _prompts(6, 300)
    requests = [
        make_request(f"r{i}", [*prefixes[i % 6], *(rng.randrange(3, 331) for _ in range(rng.randint(1, 30)))], seed=i,
                     temperature=1.0, max_tokens=rng.randint(4, 60), ignore_eos=True)
        for i in range(60)
    ]  # fmt: skip
    with _engine(num_blocks=4000) as llm:
        expected = run(llm._core, requests).tokens
    with _engine(num_blocks=90, max_inflight_steps=inflight, **HOST) as llm:
        core = llm._core
        found = run(core, requests, each_step=lambda step: core.abort_requests([f"r{step}"] if step % 9 == 4 else []))
        stats = core.stats()
        assert stats.figures["tier_hits"] > 1000
        assert_idle(core)
    for request_id, tokens in found.tokens.items():
        assert tokens == expected[request_id][: len(tokens)]
        if found.final[request_id].finish_reason != "abort":
            assert len(tokens) == len(expected[request_id])
