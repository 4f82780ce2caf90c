"""Models whose layers keep states give transformers' tokens while drafts are verified.

The proposer knows the answers and lies at every third position, so some drafts of each step stay and others do not;
prefixes that prompts share are found.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from app.backends import PROPOSERS
from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine import control
from app.engine.core import EngineCore
from app.engine.executor.base import Executor
from app.engine.executor.in_process import InProcessExecutor
from app.engine.executor.local_worker import serve
from app.records.adapter import AdapterAsk
from app.worker.worker import Worker
from tests.adapters import peft_adapter
from tests.engine.core_driver import KEY, assert_idle, make_request, run
from tests.engine.executor.forked_executor import ForkedExecutor, serve_static
from tests.hf_logprobs import prompts
from tests.models.families.state_variants import STATE_VARIANTS
from tests.models.families.test_families_in_parallel import HEADS
from tests.models.families.test_state_families import IN_ALL_WAYS, directory_of
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.spec_decode.oracle import Prophet
from tests.worker.worker_driver import decode_statically

MAX_TOKENS = 14


class Forgetful(Prophet):
    """Right but for every third position."""

    def _drafts(self, row: int, known: int) -> list[int]:
        drafts = super()._drafts(row, known)
        return [0 if (known + ahead) % 3 == 0 else draft for ahead, draft in enumerate(drafts)]


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROPOSERS._table, "forgetful", f"{__name__}:{Forgetful.__name__}")


def serve_prophets(said: dict[tuple[int, ...], list[int]], is_static: bool, *arguments: Any) -> None:
    """A worker's process that knows the proposer."""
    PROPOSERS._table["forgetful"] = f"{__name__}:{Forgetful.__name__}"
    Prophet.said = said
    (serve_static if is_static else serve)(*arguments)


def start_static(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers decode over static tensors from now on, as a GPU's do."""
    start = Worker.start

    def started(worker: Worker) -> Any:
        info = start(worker)
        decode_statically(worker, [1, 2, 4])
        return info

    monkeypatch.setattr(Worker, "start", started)


def tokens_of(
    directory: Any,
    asked: list[list[int]],
    wanted: dict[str, Any],
    target: Any = None,
    adapter: Path | None = None,
    **more: Any,
) -> tuple[dict[str, list[int]], Any, int]:
    """What an engine says to these prompts, its figures, and how many steps it took; `target`: of its workers'
    processes; `adapter`: of every second request."""
    config = EngineConfig(
        model=str(directory), device="cpu", num_threads=1, block_size=8, max_model_len=128, max_num_seqs=4,
        max_num_batched_tokens=40, num_blocks=40, max_step_s=0.0, speculative_config=wanted,
        **{"executor": "in_process", **more},
    )  # fmt: skip
    executor: Executor = InProcessExecutor(config)
    if target is not None:
        executor = ForkedExecutor(config)
        executor.target = target
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    core.start()
    try:
        asks: tuple[AdapterAsk, ...] = ()
        if adapter is not None:
            control.run(core, "load_adapter", {"name": "own", "path": str(adapter)})
            asks = (AdapterAsk("own", AdapterFiles.read(adapter, 16).digest()),)
        requests = [
            make_request(
                str(i), prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=1 if i % 3 else None
            )
            for i, prompt in enumerate(asked)
        ]
        requests = [replace(request, asks=asks) if i % 2 else request for i, request in enumerate(requests)]
        results = run(core, requests)
        assert_idle(core)
        stats = core.stats()
        return results.tokens, stats.figures, stats.steps_total
    finally:
        core.shutdown()


# Of each kind of layer one, of which Mamba 1's and Kimi's have products between convolution and states.
@pytest.mark.parametrize(
    ("name", "is_static"),
    [
        (IN_ALL_WAYS, False),
        (IN_ALL_WAYS, True),
        ("mamba", True),
        pytest.param("bamba", True, marks=pytest.mark.slow),
        pytest.param("kimi_linear", True, marks=pytest.mark.slow),
        pytest.param("lfm2", True, marks=pytest.mark.slow),
        pytest.param("minimax", True, marks=pytest.mark.slow),
        pytest.param("falcon_h1", True, marks=pytest.mark.slow),
        pytest.param("falcon_mamba", False, marks=pytest.mark.slow),
        pytest.param("jamba", False, marks=pytest.mark.slow),
        pytest.param("nemotron_h", False, marks=pytest.mark.slow),
        pytest.param("kimi_linear", False, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_transformers(name: str, is_static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = directory_of(name)
    shared, *ends = prompts((40, 3, 16, 1, 30, 9, 50))
    asked = [ends[0], *(shared + end for end in ends)]
    judge = hf_model(directory)
    truth = [hf_greedy(judge, prompt, MAX_TOKENS) for prompt in asked]
    said = {(0, *prompt): answer for prompt, answer in zip(asked, truth, strict=True)}
    monkeypatch.setattr(Prophet, "said", said)
    if is_static:
        start_static(monkeypatch)
    with torch.inference_mode():
        tokens, figures, steps = tokens_of(directory, asked, {"method": "forgetful", "num_speculative_tokens": 4})
    assert [tokens[str(i)] for i in range(len(asked))] == truth
    assert name != IN_ALL_WAYS or figures["prefix_cache_hits"] > 0
    assert 0 < figures["accepted_tokens"] < figures["draft_tokens"]
    assert steps < len(asked) * MAX_TOKENS


@pytest.mark.parametrize(
    ("name", "is_static", "stages", "ranks"),
    [
        (IN_ALL_WAYS, True, 2, 1),
        pytest.param(IN_ALL_WAYS, False, 2, 1, marks=pytest.mark.slow),
        pytest.param(IN_ALL_WAYS, True, 2, 2, marks=pytest.mark.slow),
        pytest.param("mamba", True, 2, 1, marks=pytest.mark.slow),
        pytest.param("lfm2", False, 2, 1, marks=pytest.mark.slow),
        pytest.param("falcon_h1", True, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_stages_before_the_last_hear_later_which_drafts_stay(
    name: str, is_static: bool, stages: int, ranks: int
) -> None:
    """Steps of other requests come in between."""
    family, changes = STATE_VARIANTS[name]
    directory = tiny_model(family, **{**changes, **HEADS})
    asked = prompts((3, 16, 37, 9, 30, 21, 14))
    judge = hf_model(directory)
    truth = [hf_greedy(judge, prompt, MAX_TOKENS) for prompt in asked]
    said = {(0, *prompt): answer for prompt, answer in zip(asked, truth, strict=True)}
    tokens, figures, _ = tokens_of(
        directory, asked, {"method": "forgetful", "num_speculative_tokens": 4},
        partial(serve_prophets, said, is_static), executor="local_processes",
        pipeline_parallel_size=stages, tensor_parallel_size=ranks, max_inflight_steps=3,
    )  # fmt: skip
    assert [tokens[str(i)] for i in range(len(asked))] == truth
    assert 0 < figures["accepted_tokens"] < figures["draft_tokens"]


@pytest.mark.parametrize(
    ("name", "modules", "is_static"),
    [
        ("mamba", ["x_proj", "in_proj"], True),
        pytest.param("mamba", ["x_proj", "in_proj"], False, marks=pytest.mark.slow),
        pytest.param(IN_ALL_WAYS, ["in_proj_qkv", "in_proj_a", "q_proj"], True, marks=pytest.mark.slow),
    ],
)
def test_adapters_beside_drafts_over_states(
    name: str, modules: list[str], is_static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products between convolution and states have them, too, when what stays goes through the states."""
    directory = directory_of(name)
    adapter = peft_adapter(directory, tmp_path, scale=0.2, r=4, target_modules=modules)
    plain, adapted = hf_model(directory), PeftModel.from_pretrained(hf_model(directory), adapter).eval()
    asked = prompts((3, 16, 30, 9, 37, 21))
    truth = [hf_greedy(adapted if i % 2 else plain, prompt, MAX_TOKENS) for i, prompt in enumerate(asked)]
    said = {(0, *prompt): answer for prompt, answer in zip(asked, truth, strict=True)}
    assert truth[1] != hf_greedy(plain, asked[1], MAX_TOKENS), "the adapter changes nothing"
    monkeypatch.setattr(Prophet, "said", said)
    if is_static:
        start_static(monkeypatch)
    tokens, figures, _ = tokens_of(
        directory, asked, {"method": "forgetful", "num_speculative_tokens": 4}, adapter=adapter, enable_lora=True
    )
    assert [tokens[str(i)] for i in range(len(asked))] == truth
    assert 0 < figures["accepted_tokens"] < figures["draft_tokens"]


def test_ngram_drafts_over_a_recurrent_model() -> None:
    """Out of a prompt that repeats itself: the tokens of plain decoding."""
    directory = directory_of(IN_ALL_WAYS)
    asked = [prompt * 3 for prompt in prompts((12, 20, 25))]
    judge = hf_model(directory)
    wanted = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    tokens, figures, _ = tokens_of(directory, asked, wanted)
    assert [tokens[str(i)] for i in range(len(asked))] == [hf_greedy(judge, prompt, MAX_TOKENS) for prompt in asked]
    assert figures["draft_tokens"] > 0
