"""Ranks that compute on GPUs, without a Ray cluster: transformers' tokens over NCCL and symmetric memory, and what a
worker group that ends, or is ended, leaves on the device.

On one GPU all ranks share it (benchmarks/one_gpu.py): the same engine, with other wires under the collectives.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from app import LLM, SamplingParams
from app.engine.executor import own_ray
from app.errors import EngineDeadError
from app.offline.prompts import Encoded
from benchmarks.serve_process import ROOT
from tests import limits
from tests.engine.executor.test_local_processes import gone
from tests.tiny_models import hf_greedy, hf_model, tiny_model

TINY_CHAT = str(ROOT / "app/assets/tiny-chat")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
CLOSE_MIB = 64  # a device's free memory moves by a few MiB on its own
LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2, "cuda_graphs": "off"},
    {"tensor_parallel_size": 2, "cuda_graphs": "on", "small_all_reduce": "nccl"},
    {"tensor_parallel_size": 2, "cuda_graphs": "on", "small_all_reduce": "symmetric_memory"},
    {"tensor_parallel_size": 2, "max_num_batched_tokens": 48},
    {"tensor_parallel_size": 4, "cuda_graphs": "on", "small_all_reduce": "nccl"},
    {"tensor_parallel_size": 4, "cuda_graphs": "on", "small_all_reduce": "symmetric_memory"},
    {"pipeline_parallel_size": 2, "cuda_graphs": "on"},
    {"pipeline_parallel_size": 2, "cuda_graphs": "off", "max_num_batched_tokens": 48},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "cuda_graphs": "on"},
]


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 331, (5 + 9 * i,), generator=generator).tolist() for i in range(count)]


def _engine(model: str, **options: Any) -> LLM:
    return LLM(model, tokenizer=TINY_CHAT, dtype="float32", num_blocks=512, max_num_seqs=32, **options)


def _all_reduce_note(choice: str | None) -> str:
    return {"nccl": "all-reduce: NCCL (as configured)", "symmetric_memory": "all-reduce: symmetric memory"}.get(
        choice or "", ""
    )


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: " ".join(f"{value}" for value in options.values()))
def test_greedy_tokens_equal_transformers(one_gpu: bool, options: dict[str, Any]) -> None:
    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if not one_gpu and ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    directory = tiny_model("llama", **HEADS)
    judge, prompts = hf_model(directory), _prompts(16)
    expected = [hf_greedy(judge, prompt, 24) for prompt in prompts]
    with _engine(str(directory), **options) as llm:
        notes = "\n".join(llm.worker_info.notes)
        assert _all_reduce_note(options.get("small_all_reduce")) in notes
        for where in ("computed", "from the prefix cache"):
            found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
            assert found == expected, (where, notes)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_in_one_kernel_with_the_norm_give_the_logprobs_of_nccl(one_gpu: bool, ranks: int) -> None:
    """In bfloat16: prompts and decodes of few rows go by them; greedy tokens are compared up to a near tie."""
    if not one_gpu and ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} GPUs")
    directory = tiny_model("llama", **HEADS, hidden_size=256)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    found = []
    for choice in ("nccl", "fused"):
        options: dict[str, Any] = {
            "dtype": "bfloat16",
            "tensor_parallel_size": ranks,
            "cuda_graphs": "on",
            "small_all_reduce": choice,
        }
        with LLM(str(directory), tokenizer=TINY_CHAT, num_blocks=512, max_num_seqs=32, **options) as llm:
            assert ("one kernel" in "\n".join(llm.worker_info.notes)) == (choice == "fused")
            outs = [out.outputs[0] for out in llm.generate(_prompts(16), params, use_tqdm=False)]
        found.append([[(step.token_ids[0], step.logprobs[0]) for step in out.logprobs or ()] for out in outs])
    apart = []
    for theirs, ours in zip(*found, strict=True):
        for (expected, high), (token, logprob) in zip(theirs, ours, strict=True):
            apart.append(abs(high - logprob))
            if token != expected:
                break
    assert len(apart) > 16 * 6
    assert sum(apart) / len(apart) < 0.1, "one other rounding may move a logprob of this model by 0.06"
    assert max(apart) < 0.7


@pytest.fixture
def two_ray_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster that says it has two GPUs, be it true or not, with the settings of ours."""
    ray = pytest.importorskip("ray")  # which a machine for the rest may lack
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray would count them
    for name, value in own_ray.SETTINGS.items():
        monkeypatch.setenv(name, value)
    ray.init(
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}},
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("two_ray_gpus")
@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["TP 2", "PP 2"])
def test_ray_workers_give_the_same_tokens_over_a_compiled_graph(one_gpu: bool, layout: dict[str, int]) -> None:
    directory = tiny_model("llama", **HEADS)
    judge, prompts = hf_model(directory), _prompts(8)
    expected = [hf_greedy(judge, prompt, 24) for prompt in prompts]
    with _engine(str(directory), executor="ray_workers", **layout) as llm:
        assert any(note.startswith("step transport: compiled_graph") for note in llm.worker_info.notes)
        found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert found == expected


def _free_mib(expected: list[int] | None = None) -> list[int]:
    """Free memory of each GPU, waiting until it is `expected` again: the driver frees some time after a process."""
    limit = limits.Limit(20.0)
    while True:
        free = [torch.cuda.mem_get_info(device)[0] >> 20 for device in range(torch.cuda.device_count())]
        if expected is None or _close(free, expected) or not limit.left_s():
            return free
        limits.pause(0.1)


def _close(free: list[int], expected: list[int]) -> bool:
    return max(abs(a - b) for a, b in zip(free, expected, strict=True)) < CLOSE_MIB


def test_start_and_stop_leave_no_memory_behind(one_gpu: bool) -> None:
    directory, before = str(tiny_model("llama", **HEADS)), _free_mib()
    for _ in range(3):
        with _engine(directory, tensor_parallel_size=2) as llm:
            llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
            assert not _close(_free_mib(), before), "the ranks are somewhere else"
        assert _close(after := _free_mib(before), before), (before, after)


def _finish(llm: LLM) -> None:
    while llm._core.has_work():
        llm._core.step()


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["TP 2", "PP 2"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_the_worker_group_and_frees_the_device(
    one_gpu: bool, layout: dict[str, int], victim: int, sign: signal.Signals
) -> None:
    before = _free_mib()
    llm = _engine(str(tiny_model("llama", **HEADS)), step_timeout_s=limits.scaled_s(3.0), **layout)
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    try:
        pids = llm._core.executor.worker_pids
        for i, prompt in enumerate(_prompts(4)):
            llm._core.enqueue(llm._generation.job(i, Encoded(None, prompt), endless)[0].request)
        for _ in range(8):
            llm._core.step()
        os.kill(pids[victim], sign)
        with pytest.raises(EngineDeadError, match=f"worker rank {victim} "):
            _finish(llm)
    finally:
        llm.shutdown()
    assert _close(after := _free_mib(before), before), (before, after)
    assert gone(pids)


ENDLESS = """
from app import LLM, SamplingParams
from benchmarks.one_gpu import worker_groups_on_one_gpu
with worker_groups_on_one_gpu({one_gpu}):
    llm = LLM({model!r}, tokenizer={tokenizer!r}, tensor_parallel_size=2, num_blocks=512, max_num_seqs=32)
print(*llm._core.executor.worker_pids, flush=True)
while True:
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), use_tqdm=False)
"""


def test_a_killed_driver_leaves_neither_processes_nor_memory(one_gpu: bool) -> None:
    before = _free_mib()
    script = ENDLESS.format(one_gpu=one_gpu, model=str(tiny_model("llama", **HEADS)), tokenizer=TINY_CHAT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        limits.pause(0.5)  # into the midst of the steps
        driver.kill()
    assert _close(after := _free_mib(before), before), (before, after)
    assert gone(pids)
