"""The driver on one Ray node, the workers on another: TCP instead of the unix socket, channels over Ray's network."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from app.config.engine import EngineConfig
from app.engine.executor.ray_workers import RayWorkersExecutor
from app.errors import EngineDeadError
from tests import limits
from tests.engine.executor.fake_worker import FAKE_WORKER, LARGE, expected_tokens, make_step_message
from tests.engine.executor.semaphores import graph_semaphores, left_semaphores


@pytest.fixture(scope="module")
def far_workers() -> Iterator[None]:
    """A head without CPUs, where this process is, and a node of two CPUs."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[3])}},
    )
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.usefixtures("far_workers")
@pytest.mark.parametrize("transport", ["socket", "compiled_graph"])
def test_workers_on_another_node(transport: str) -> None:
    semaphores = graph_semaphores()
    executor = RayWorkersExecutor(
        EngineConfig(step_transport=transport, max_inflight_steps=8, step_timeout_s=limits.patience_s()), FAKE_WORKER
    )
    try:
        executor.start()
        assert executor._worker_group is not None
        assert not executor._worker_group.ranks[0].same_node
        step_messages = [make_step_message(step, (LARGE, 400_000), padding=step % 2 * 3_000_000) for step in range(8)]
        for step_message in step_messages:
            executor.submit(step_message)
        for step_message in step_messages:
            (output,) = executor.collect()
            assert output.sampled_token_ids.tolist() == expected_tokens(step_message)
        executor.park()
        assert executor.call("add_rank", 10) == [10]
        executor.submit(step_messages[0])
        assert executor.collect()[0].step_id == 0
        os.kill(executor.worker_pids[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="is gone"):
            limits.wait_until(executor.check_health, "notice of the death", 10.0)
    finally:
        executor.shutdown()
    assert not left_semaphores(semaphores)


@pytest.mark.usefixtures("far_workers")
@pytest.mark.parametrize("steps", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_end_of_a_parked_worker_group(steps: int) -> None:
    """Its node's own Ray process survives that, and no semaphore is left on either node; also just after it woke."""
    semaphores = graph_semaphores()
    executor = RayWorkersExecutor(EngineConfig(step_transport="compiled_graph"), FAKE_WORKER)
    executor.start()
    executor.park()
    for step in range(steps):
        executor.submit(make_step_message(step))
    executor.shutdown()
    assert not left_semaphores(semaphores)
    assert ray.get(ray.put("still here"), timeout=limits.patience_s()) == "still here"
    assert all(node["Alive"] for node in ray.nodes())
