"""The whole engine on a real GPU: transformers' tokens, Triton kernels by default, steps that overlap (I2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from app import LLM, SamplingParams
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.worker.worker import Worker
from benchmarks.gpu_check import check_tokens
from benchmarks.serve_process import ROOT
from tests.engine.core_driver import assert_idle, make_request, run
from tests.tiny_models import hf_greedy, hf_model, tiny_model

pytestmark = pytest.mark.gpu

TINY_CHAT = str(ROOT / "app/assets/tiny-chat")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80, "hidden_size": 112}),
    ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}),
    ("qwen3", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}),
    ("mistral", {"sliding_window": 24}),
]


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def _prompts(count: int = 16) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, 331, (5 + 9 * i,), generator=generator).tolist() for i in range(count)
    ]  # across block edges


def _tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]


def _engine(model: str, **options: Any) -> LLM:
    return LLM(model, tokenizer=TINY_CHAT, dtype="float32", gpu_memory_utilization=0.2, max_num_seqs=32, **options)


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_greedy_tokens_equal_transformers(family: str, changes: dict[str, Any]) -> None:
    directory = tiny_model(family, **changes)
    judge = hf_model(directory)
    prompts = _prompts()
    expected = [hf_greedy(judge, prompt, 24) for prompt in prompts]
    for inflight, chunk, graphs in ((1, 2048, "on"), (2, 2048, "on"), (2, 32, "on"), (2, 2048, "off")):
        options = {"max_inflight_steps": inflight, "max_num_batched_tokens": chunk, "cuda_graphs": graphs}
        with _engine(str(directory), **options) as llm:
            notes = llm.worker_info.notes
            assert any("triton" in note for note in notes), notes
            assert any("CUDA graphs: off" in note for note in notes) == (graphs == "off"), notes
            assert _tokens(llm, prompts) == expected, f"{inflight} in flight, chunks of {chunk}, graphs {graphs}"
            assert _tokens(llm, prompts) == expected, "from the prefix cache"


def test_cpu_and_gpu_give_the_same_sampled_tokens() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True)
    directory = str(tiny_model("llama"))
    with _engine(directory) as gpu, _engine(directory, device="cpu") as cpu:
        assert _tokens(gpu, _prompts(8), params) == _tokens(cpu, _prompts(8), params)


def test_graphs_say_what_ordinary_steps_say() -> None:
    """Greedy, sampled, filtered, with penalties and logprobs; 2 and 3 steps in flight; sizes with padding."""
    assert check_tokens({})


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_shared_prefixes_give_transformers_tokens(graphs: str) -> None:
    """Prefixes of several splits, read once by up to 12 requests; cached by the first one alone."""
    directory = tiny_model("llama", max_position_embeddings=4096)
    judge = hf_model(directory)
    generator = torch.Generator().manual_seed(2)
    outer, inner = (torch.randint(3, 331, (n,), generator=generator).tolist() for n in (800, 560))
    prompts = [outer + inner * (i % 2) + prompt for i, prompt in enumerate(_prompts(12))] + _prompts(3)
    expected = [hf_greedy(judge, prompt, 24) for prompt in prompts]
    with _engine(str(directory), cuda_graphs=graphs, cascade_attention="on") as llm:
        assert any("shared prefixes" in note for note in llm.worker_info.notes)
        _tokens(llm, [outer + inner])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            assert _tokens(llm, prompts) == expected
    launches = {event.key: event.count for event in profile.key_averages()}
    assert sum(count for name, count in launches.items() if "cascade_kernel" in name) >= 2 * 20, launches


def test_aborted_and_preempted_while_steps_are_in_flight() -> None:
    requests = [
        make_request(f"r{i}", prompt, temperature=0.8 * (i % 2), seed=i, max_tokens=60, ignore_eos=True)
        for i, prompt in enumerate(_prompts())
    ]
    directory = str(tiny_model("llama"))
    with _engine(directory, cuda_graphs="off") as llm:
        expected = run(llm._core, requests).tokens
    with _engine(directory, cuda_graphs="on", max_inflight_steps=3, num_blocks=60) as llm:
        core = llm._core
        found = run(core, requests, each_step=lambda step: core.abort_requests([f"r{step // 7}"] if step < 35 else []))
        assert core.stats().figures["preemptions"] > 0
        assert_idle(core)
    assert sum(final.finish_reason == "abort" for final in found.final.values()) == 5
    for name, tokens in found.tokens.items():
        aborted = found.final[name].finish_reason == "abort"
        assert tokens == (expected[name][: len(tokens)] if aborted else expected[name]), name


def test_decode_steps_are_replayed_from_graphs() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with _engine(str(tiny_model("llama")), cuda_graphs="on") as llm:
        _tokens(llm, _prompts(4))
        with torch.profiler.profile(activities=activities) as profile:
            _tokens(llm, _prompts(4))
    replays = sum(event.count for event in profile.key_averages() if "GraphLaunch" in event.key)
    assert replays >= 2 * 20, {event.key: event.count for event in profile.key_averages()}


def test_triton_kernels_are_what_runs() -> None:
    with _engine(str(tiny_model("llama"))) as llm:
        _tokens(llm, _prompts(4))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            _tokens(llm, _prompts(4))
    launches = {event.key: event.count for event in profile.key_averages()}
    assert sum(count for name, count in launches.items() if "decode" in name) >= 2 * 20, launches
    assert sum(count for name, count in launches.items() if "prefill" in name) >= 2, launches


def test_preparing_a_step_overlaps_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """When step message N+1's call begins, the device is still busy with step N."""
    busy: list[bool] = []
    execute: Callable[[Worker, SchedulerOutput], list[ModelRunnerOutput]] = Worker.execute

    def watched(self: Worker, step_message: SchedulerOutput) -> list[ModelRunnerOutput]:
        if len(step_message.rows) and self._pending:
            busy.append(not self._pending[-1].is_done())
        return execute(self, step_message)

    monkeypatch.setattr(Worker, "execute", watched)
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "head_dim": 128}
    directory = tiny_model(
        "llama", num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096, **shape
    )
    prompts = [[7 + i] * 2000 for i in range(16)]
    with LLM(str(directory), tokenizer=TINY_CHAT, dtype="float32", gpu_memory_utilization=0.5) as llm:
        _tokens(llm, prompts)
    assert sum(busy) >= len(busy) // 2, f"{sum(busy)} of {len(busy)} step messages found the device busy"


def test_tiny_chat_on_the_gpu_answers_as_on_the_cpu() -> None:
    messages = [[{"role": "user", "content": f"What is {i} + {i + 3}?"}] for i in range(10, 40)]
    answers = []
    for device in ("cuda", "cpu"):
        with LLM("tiny-chat", device=device, dtype="float32", gpu_memory_utilization=0.2) as llm:
            outputs = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
            answers.append([out.outputs[0].text for out in outputs])
    assert answers[0] == answers[1]
