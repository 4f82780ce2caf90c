"""Every family over two ranks, split by heads or by layers: chunked, cached, preempted, two steps in flight.

CI takes a sample; `make acceptance` takes all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests import limits
from tests.engine.core_driver import assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.hf_logprobs import prompts
from tests.models.families.test_families import VARIANTS
from tests.tiny_models import hf_greedy, hf_model, tiny_model

LAYOUTS = {"tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2, "max_inflight_steps": 3}}
# Heads that two ranks can share out; old families have these numbers already.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
OWN_HEADS = ("gpt2", "gpt_neox", "opt", "falcon", "phi", "minicpm3", "youtu", "bloom", "mpt", "gptj", "codegen")
OWN_HEADS += ("gpt_neo", "xglm", "biogpt", "jetmoe", "diffllama")
# Refused: last layers read keys and values of layers of another stage, streams lie side by side.
ONE_STAGE = ("gemma3n", "gemma3n-unshared", "gemma4-shared")
CASES = [(name, layout) for name in VARIANTS for layout in LAYOUTS if layout != "pp2" or name not in ONE_STAGE]
SAMPLE = random.Random(17).sample(CASES, 4)


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_tokens_equal_transformers(name: str, layout: str) -> None:
    family, changes = VARIANTS[name]
    heads = {} if family in OWN_HEADS else HEADS
    check_layout(family, {**changes, **heads}, LAYOUTS[layout])


def check_layout(family: str, changes: dict[str, Any], layout: dict[str, Any], num_blocks: int = 24) -> None:
    directory = tiny_model(family, **changes)
    judge = hf_model(directory)
    run_layout(directory, layout, lambda prompt: hf_greedy(judge, prompt, 8), num_blocks)


def run_layout(
    directory: Path, layout: dict[str, Any], says: Callable[[list[int]], list[int]], num_blocks: int = 24
) -> None:
    shared = prompts((40,))[0]
    asked = [*prompts((3, 16, 37, 60)), *(shared + one for one in prompts((5, 9, 20)))]
    options: dict[str, Any] = {
        "block_size": 8,
        "num_blocks": num_blocks,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
    }
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        executor="local_processes",
        max_model_len=128,
        num_threads=1,
        step_timeout_s=limits.patience_s(),
        **options,
        **layout,
    )
    core = EngineCore(config, ModelInfo.from_directory(config.model), ForkedExecutor(config), b"a secret for tests")
    try:
        core.start()
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=0)
        results = run(core, [EngineRequest(str(i), prompt, params) for i, prompt in enumerate(asked)])
        assert_idle(core)
        assert core.stats().figures["prefix_cache_hits"] > 0, "no prefix was found"
    finally:
        core.shutdown()
    assert [results.tokens[str(i)] for i in range(len(asked))] == [says(prompt) for prompt in asked]
