"""Whisper over two ranks, by heads and by layers: chunked, cached, preempted, steps in flight."""

from __future__ import annotations

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from tests import limits
from tests.engine.core_driver import assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.engine.test_sounds import ASKED, answers, request
from tests.models.families.test_families_in_parallel import LAYOUTS
from tests.tiny_sounds import noise, tiny_whisper


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_equal_transformers(layout: str) -> None:
    config = EngineConfig(
        model=str(tiny_whisper()), device="cpu", executor="local_processes", max_model_len=64, num_threads=1,
        step_timeout_s=limits.patience_s(), block_size=8, num_blocks=20, max_num_seqs=4, max_num_batched_tokens=24,
        **LAYOUTS[layout],
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), ForkedExecutor(config), b"a secret for tests")
    try:
        core.start()
        for _ in range(2):
            results = run(core, [request(i, noise(seed), prompt) for i, (seed, prompt) in enumerate(ASKED)])
            assert [results.tokens[f"r{i}"] for i in range(len(ASKED))] == answers()
        assert_idle(core)
    finally:
        core.shutdown()
