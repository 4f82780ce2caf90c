"""`deterministic: batch_and_layout` on GPUs: the logprobs of a request are the same bits on one and on several."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from tests.engine.core_driver import KEY, run
from tests.tiny_models import tiny_model
from tests.worker.test_exact_steps import Logprobs, assert_same, in_order
from tests.worker.test_exact_steps_on_gpu import bits, requests

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 1024}
MODELS = {
    "llama": {"intermediate_size": 2816, "mlp_bias": True, "attention_bias": True, "vocab_size": 5001},
    "qwen3": {"intermediate_size": 3072, "tie_word_embeddings": True, "vocab_size": 5001},
}
LAYOUTS = {"tp2": (2, 1), "tp4": (4, 1), "pp2": (1, 2), "tp2 pp2": (2, 2)}


def logprobs(model: str, together: bool, **options: Any) -> Logprobs:
    """The bits of each request, alone or together."""
    fixed = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 2048, "max_step_s": 0, "max_num_seqs": 64}
    free = {"num_blocks": 2000, "deterministic": "batch_and_layout", "enable_prefix_caching": False}
    config = EngineConfig(model=str(directory_of(model)), **{**fixed, **free, **options})
    core = EngineCore(config, ModelInfo.of(config), create_executor(config), KEY)
    core.start()
    try:
        if together:
            return bits(run(core, requests()))
        found: Logprobs = {}
        for request in requests():
            results, name = run(core, [request]), request.request_id
            of_prompt = [one for one in results.prompt_logprobs.get(name, ()) if one is not None]
            found[name] = [in_order(one) for one in (*of_prompt, *results.logprobs[name])]
        return found
    finally:
        core.shutdown()


@cache
def directory_of(model: str) -> Path:
    return tiny_model(model, max_position_embeddings=4096, **SIZES, **MODELS[model])


@cache
def alone(model: str) -> Logprobs:
    return logprobs(model, together=False, executor="in_process", cuda_graphs="off")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_gpus(one_gpu: bool, model: str, layout: str) -> None:
    tensor, pipeline = LAYOUTS[layout]
    if not one_gpu and tensor * pipeline > torch.cuda.device_count():
        pytest.skip(f"needs {tensor * pipeline} GPUs")
    truth = alone(model)
    found = logprobs(
        model, together=True, executor="local_processes", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline,
        max_num_batched_tokens=512,
    )  # fmt: skip
    assert_same(found, truth)
