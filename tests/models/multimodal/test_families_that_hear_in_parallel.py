"""Sounds in prompts over two ranks, by heads and by layers: chunked, cached, preempted, steps in flight.

CI takes a sample, which its seed chooses; `make acceptance` takes all.
"""

from __future__ import annotations

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests import limits
from tests.engine.core_driver import assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.models.families.test_families_in_parallel import LAYOUTS
from tests.tiny_hearing import HEARING, TOKENS, hearing_model, judged, prompt_of, prompts_of

# A stage must hold the layers whose keys and values its own read.
ONE_STAGE = ("gemma3n", "gemma4")
CASES = [(name, layout) for name in HEARING for layout in LAYOUTS if layout != "pp2" or name not in ONE_STAGE]
BLOCK_SIZE = 8


@pytest.mark.parametrize(("name", "layout"), CASES, ids=["-".join(case) for case in CASES])
def test_tokens_equal_transformers(name: str, layout: str) -> None:
    prompts = [prompt_of(name, parts) for parts in prompts_of(name)]
    longest = max(len(tokens) for tokens, _ in prompts) + TOKENS
    config = EngineConfig(
        model=str(hearing_model(name)), device="cpu", executor="local_processes", max_model_len=256, num_threads=1,
        step_timeout_s=limits.patience_s(), block_size=BLOCK_SIZE, num_blocks=max(16, -(-longest // BLOCK_SIZE) + 2),
        max_num_seqs=4, max_num_batched_tokens=24, **LAYOUTS[layout],
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), ForkedExecutor(config), b"a secret for tests")
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, seed=0)
    try:
        core.start()
        for _ in range(2):
            requests = [EngineRequest(str(i), own[0], params, asks=(own[1],)) for i, own in enumerate(prompts)]
            results = run(core, requests)
            expected = [judged(name, index)[1] for index in range(len(prompts))]
            assert [results.tokens[str(i)] for i in range(len(prompts))] == expected
        assert_idle(core)
    finally:
        core.shutdown()
