"""Actors that Ray gives GPUs of their own, on a node whose GPUs stay visible to all; no GPU is touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from app.config.engine import EngineConfig
from app.engine.executor.ray_workers import RayWorkersExecutor
from tests import limits
from tests.engine.executor.fake_worker import FAKE_WORKER, expected_tokens, make_step_message


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[None]:
    """A cluster that says it has two."""
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        (1, "compiled_graph"),
        (2, "socket"),
        pytest.param(1, "socket", marks=pytest.mark.slow),
        pytest.param(2, "compiled_graph", marks=pytest.mark.slow),
    ],
)
def test_steps_reach_every_rank(ranks: int, transport: str) -> None:
    config = EngineConfig(
        device="cuda", tensor_parallel_size=ranks, step_transport=transport, step_timeout_s=limits.patience_s()
    )
    executor = RayWorkersExecutor(config, FAKE_WORKER)
    try:
        info = executor.start()
        # Each of several workers sees all GPUs and has its own; a single one sees none but its own.
        assert {f"place={rank},{ranks},{rank}" for rank in range(ranks)} <= set(info.notes)
        step_messages = [make_step_message(step) for step in range(3)]
        for step_message in step_messages:
            executor.submit(step_message)
        for step_message in step_messages:
            assert executor.collect()[0].sampled_token_ids.tolist() == expected_tokens(step_message)
    finally:
        executor.shutdown()
