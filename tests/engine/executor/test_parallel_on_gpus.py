"""Ranks on GPUs of their own, without a Ray cluster: transformers' tokens over NCCL and symmetric memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app import LLM, SamplingParams
from benchmarks.serve_process import ROOT
from tests.tiny_models import hf_greedy, hf_model, tiny_model

pytestmark = pytest.mark.multi_gpu

TINY_CHAT = str(ROOT / "app/assets/tiny-chat")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MIB = 1 << 20


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 331, (5 + 9 * i,), generator=generator).tolist() for i in range(count)]


def _engine(model: str, **options: Any) -> LLM:
    return LLM(model, tokenizer=TINY_CHAT, dtype="float32", gpu_memory_utilization=0.2, max_num_seqs=32, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "cuda_graphs": "off"},
        {"tensor_parallel_size": 2, "cuda_graphs": "on"},
        {"tensor_parallel_size": 2, "cuda_graphs": "on", "small_all_reduce": "symmetric_memory"},
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 48},
        {"pipeline_parallel_size": 2, "cuda_graphs": "on"},
        {"pipeline_parallel_size": 2, "cuda_graphs": "off", "max_num_batched_tokens": 48},
    ],
    ids=lambda options: " ".join(f"{value}" for value in options.values()),
)
def test_greedy_tokens_equal_transformers(options: dict[str, Any]) -> None:
    directory = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    judge, prompts = hf_model(directory), _prompts(16)
    expected = [hf_greedy(judge, prompt, 24) for prompt in prompts]
    with _engine(str(directory), **options) as llm:
        for where in ("computed", "from the prefix cache"):
            found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
            assert found == expected, (where, llm.worker_info.notes)


def test_start_and_stop_leave_no_memory_behind() -> None:
    directory = str(tiny_model("llama", num_attention_heads=4, num_key_value_heads=2))
    free = []
    for _ in range(4):
        with _engine(directory, tensor_parallel_size=2) as llm:
            llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        free.append([torch.cuda.mem_get_info(device)[0] for device in range(2)])
    assert max(abs(a - b) for first, last in [(free[0], free[-1])] for a, b in zip(first, last, strict=True)) < 64 * MIB
