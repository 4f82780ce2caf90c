"""`deterministic: batch_and_layout`: the logprobs of a request are the same bits in one worker and in several.

One worker runs each request alone; groups of workers over gloo run them together (tests/worker/test_exact_steps.py).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.worker.exact_limits import OVER_LAYOUTS
from tests import limits
from tests.engine.core_driver import KEY, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.tiny_models import tiny_model
from tests.worker.test_exact_steps import DTYPES, Logprobs, assert_same, bits, requests

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24, "hidden_size": 88, "vocab_size": 331}
# Sizes that are no multiples of a vector's, a vocabulary that no number of ranks divides, biases and tied heads.
MODELS = {
    "llama": lambda: tiny_model("llama", intermediate_size=172, mlp_bias=True, attention_bias=True, **SIZES),
    "mistral": lambda: tiny_model("mistral", intermediate_size=100, sliding_window=45, **SIZES),
    "qwen2": lambda: tiny_model("qwen2", intermediate_size=132, tie_word_embeddings=True, **SIZES),
    "qwen3": lambda: tiny_model("qwen3", intermediate_size=172, tie_word_embeddings=True, **SIZES),
}
LAYOUTS = {"tp2": (2, 1), "tp4": (4, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}


def config_of(directory: Path, dtype: str, **options: Any) -> EngineConfig:
    fixed = {"device": "cpu", "num_threads": 1, "max_model_len": 200, "block_size": 8, "num_blocks": 400}
    free = {"max_num_seqs": 8, "max_step_s": 0, "deterministic": "batch_and_layout"}
    patience = limits.patience_s()
    return EngineConfig(model=str(directory), dtype=dtype, step_timeout_s=patience, **{**fixed, **free, **options})


@cache
def directory_of(model: str) -> Path:
    return MODELS[model]()


@cache
def alone(model: str, dtype: str) -> Logprobs:
    config = config_of(directory_of(model), dtype, executor="in_process", enable_prefix_caching=False)
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    try:
        found: Logprobs = {}
        for request in requests():
            found |= bits(run(core, [request]))
        return found
    finally:
        core.shutdown()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_workers(model: str, layout: str, dtype: str) -> None:
    tensor, pipeline = LAYOUTS[layout]
    config = config_of(
        directory_of(model), dtype, executor="local_processes", tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline, max_num_batched_tokens=48,
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), ForkedExecutor(config), KEY)
    core.start()
    try:
        found = bits(run(core, requests()))
    finally:
        core.shutdown()
    assert_same(found, alone(model, dtype))


def test_each_architecture_is_compared() -> None:
    assert {ModelInfo.from_directory(str(make())).architecture for make in MODELS.values()} == OVER_LAYOUTS
