"""Layers that keep their window's blocks only: tokens of transformers, whatever becomes of the blocks they gave back.

In process, each block that no request holds and no hash finds is filled with NaN after every step: nobody reads one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.records.kv_groups import WHOLE
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests import limits
from tests.engine.core_driver import assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.hf_logprobs import prompts
from tests.tiny_models import hf_greedy, hf_model, tiny_model

BLOCK, MAX_TOKENS = 4, 12
SIX = {"num_hidden_layers": 7, "sliding_window": 9, "num_attention_heads": 4, "num_key_value_heads": 2}
FOUR = {"num_hidden_layers": 4, "sliding_window": 9}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {**SIX, "query_pre_attn_scalar": 40}),
    "gemma2": ("gemma2", {"num_hidden_layers": 4, "sliding_window": 6, "query_pre_attn_scalar": 20}),
    "mistral": ("mistral", {"sliding_window": 11}),
    "cohere2": ("cohere2", FOUR),
    "olmo3": ("olmo3", FOUR),
}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 200},
    "chunked": {"num_blocks": 200, "max_num_batched_tokens": 7, "max_inflight_steps": 3},
    "preempted": {"max_num_batched_tokens": 24},
    "host-tier": {"num_blocks": 40, "max_num_batched_tokens": 24, "kv_host_memory_bytes": 4 << 20},
}
TOO_FEW = {"gemma3": 14, "mistral": 8}  # blocks, so that short prompts come in whose answers do not fit
CASES = [(model, engine) for model in MODELS for engine in ENGINES]
SAMPLE = (
    [(model, "preempted") for model in MODELS] + [("gemma3", engine) for engine in ENGINES] + [("mistral", "host-tier")]
)


def asked() -> list[list[int]]:
    """Prompts longer than the windows, of which some share a beginning that is longer too."""
    shared, other = prompts((46, 31))
    return [*prompts((3, 17, 50)), shared, *(shared + one for one in prompts((1, 9, 14))), other, other[:22] + shared]


def configuration(name: str, **options: Any) -> EngineConfig:
    family, changes = MODELS[name]
    base: dict[str, Any] = {
        "device": "cpu",
        "num_threads": 1,
        "max_model_len": 96,
        "block_size": BLOCK,
        "max_num_seqs": 6,
    }
    return EngineConfig(model=str(tiny_model(family, **changes)), **{**base, **options})


def generate(core: EngineCore, rounds: int = 2) -> list[list[int]]:
    """What the core makes of the prompts, which it gets once and then again."""
    made: list[list[int]] = []
    for number in range(rounds):
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, seed=0)
        requests = [EngineRequest(f"{number}-{i}", prompt, params) for i, prompt in enumerate(asked())]
        results = run(core, requests, each_step=lambda step: poison(core))
        assert_idle(core)
        made += [results.tokens[request.request_id] for request in requests]
    return made


@torch.inference_mode()
def poison(core: EngineCore) -> None:
    if isinstance(core.executor, InProcessExecutor):
        parts = core.executor._worker._parts
        assert parts is not None
        device = parts.state.device
        nowhere = [] if device.type == "cuda" else [0]  # what pads a graph's step reads the table of row 0
        blank = torch.tensor(core.scheduler.kv.pool._blank + nowhere, dtype=torch.int64, device=device)
        for place in parts.cache.places:
            place[blank] = float("nan")


def expected(name: str) -> list[list[int]]:
    family, changes = MODELS[name]
    judge = hf_model(tiny_model(family, **changes))
    return [hf_greedy(judge, prompt, MAX_TOKENS) for prompt in asked()] * 2


@pytest.mark.parametrize(
    ("name", "engine"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_tokens_equal_transformers(name: str, engine: str) -> None:
    config = configuration(name, **{"num_blocks": TOO_FEW.get(name, 26), **ENGINES[engine]})
    core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), b"a secret for tests")
    try:
        info = core.start()
        assert info.kv_windows != WHOLE
        tokens, stats = generate(core), core.stats()
    finally:
        core.shutdown()
    assert tokens == expected(name)
    assert stats.figures["found_tokens"] > 0, "no prefix was found"
    assert (stats.figures["preemptions"] > 0) == (engine == "preempted")
    assert (stats.figures["loaded_tokens"] > 0) == (engine == "host-tier")


def test_stages_of_a_pipeline_agree_on_the_groups() -> None:
    """The first stage of Gemma 3's seven layers has none that sees all."""
    config = configuration(
        "gemma3",
        executor="local_processes",
        pipeline_parallel_size=2,
        pipeline_partition=(4, 3),
        max_inflight_steps=3,
        num_blocks=60,
        max_num_batched_tokens=24,
        step_timeout_s=limits.patience_s(),
    )
    core = EngineCore(config, ModelInfo.from_directory(config.model), ForkedExecutor(config), b"a secret for tests")
    try:
        assert core.start().kv_windows[0] is None
        tokens = generate(core)
    finally:
        core.shutdown()
    assert tokens == expected("gemma3")


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_tokens_on_a_gpu(name: str, graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels, with and without graphs; blocks that were given back hold NaN here too."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    # Blocks of 16 tokens are the least that its kernels know: more of them, as each prompt ends within one.
    config = configuration(name, num_blocks=24, block_size=16, device="cuda", dtype="float32", cuda_graphs=graphs)
    core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), b"a secret for tests")
    try:
        assert core.start().kv_windows != WHOLE
        tokens = generate(core)
    finally:
        core.shutdown()
    assert tokens == expected(name)
