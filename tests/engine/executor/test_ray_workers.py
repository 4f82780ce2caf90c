"""The executor over Ray on a real local cluster, over both transports, with a worker that has no model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.config.engine import EngineConfig
from app.engine.executor import placement as placement_module
from app.engine.executor.ray_workers import RayWorkersExecutor
from app.engine.executor.transports.compiled_graph import CAPACITY_BYTES
from app.errors import CheckpointError, ConfigError, EngineDeadError, MantaError
from app.records.worker_info import WorkerInfo
from tests import limits
from tests.engine.executor.fake_replica import Replica
from tests.engine.executor.fake_worker import FAIL, KILL, LARGE, SLEEP_MS, STOP, expected_tokens, make_step_message
from tests.engine.executor.semaphores import graph_semaphores, left_semaphores
from tests.engine.executor.test_local_processes import gone

TRANSPORTS = ("socket", "compiled_graph")
KILLED: list[Any] = [("socket", "stepping"), ("compiled_graph", "parked")]
KILLED.append(pytest.param("compiled_graph", "stepping", marks=pytest.mark.slow))
DETECTED_S = 10.0  # the aims are 1 s and 3 s, and nothing else ends within this
HERE = Path(__file__).parent
Started = tuple[RayWorkersExecutor, WorkerInfo]

pytestmark = pytest.mark.usefixtures("ray_cluster")


def either(transport: str) -> pytest.MarkDecorator:
    """Over this one in `make test`, where each of the two has its tests; over both in `make acceptance`."""
    params = [pytest.param(name, marks=() if name == transport else pytest.mark.slow) for name in TRANSPORTS]
    return pytest.mark.parametrize("transport", params)


def start(transport: str, worker: str = "FakeWorker", **options: Any) -> Started:
    config = EngineConfig(step_transport=transport).model_copy(update=options)  # type: ignore[arg-type]
    executor = RayWorkersExecutor(config, f"tests.engine.executor.fake_worker:{worker}")
    return executor, executor.start()


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared(request: pytest.FixtureRequest, ray_cluster: str) -> Iterator[Started]:
    """An executor for tests that leave it as they found it."""
    executor, info = start(request.param)
    yield executor, info
    executor.shutdown()


@pytest.fixture
def fresh() -> Iterator[Callable[..., Started]]:
    """Starts executors and shuts them down in the end."""
    executors: list[RayWorkersExecutor] = []

    def make(*args: Any, **options: Any) -> Started:
        started = start(*args, **options)
        executors.append(started[0])
        return started

    yield make
    for executor in executors:
        executor.shutdown()


def cpu_time_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def poll_health(executor: RayWorkersExecutor) -> None:
    """Until it raises."""
    limits.wait_until(executor.check_health, "notice of a death", DETECTED_S)


def submit_and_collect(executor: RayWorkersExecutor) -> None:
    executor.submit(make_step_message(1))
    executor.collect()


def test_start_reports_choices_and_pins_the_environment(shared: Started) -> None:
    executor, info = shared
    assert (info.num_blocks, info.device, info.dtype) == (100, "cpu", "float32")
    assert f"step transport: {executor._config.step_transport} (set by step_transport)" in info.notes
    assert any(note.startswith("RAY_CGRAPH_buffer_size_bytes=") for note in info.notes)
    assert f"OMP_NUM_THREADS={len(os.sched_getaffinity(0))}" in info.notes  # not Ray's 1
    assert "place=0,1,0" in info.notes
    executor.check_health()


def test_outputs_keep_the_order_of_steps(shared: Started) -> None:
    executor, _ = shared
    step_messages = [make_step_message(step, (SLEEP_MS, 3 - step % 3), rows=1 + step % 5) for step in range(40)]
    collected = []
    for number, step_message in enumerate(step_messages):
        executor.submit(step_message)
        if number >= 2:
            collected += executor.collect()
    collected += executor.collect() + executor.collect()
    assert [output.step_id for output in collected] == list(range(40))
    for step_message, output in zip(step_messages, collected, strict=True):
        assert output.sampled_token_ids.tolist() == expected_tokens(step_message)
        assert output.sampled_token_ids.dtype == np.int32


def test_submit_returns_before_the_step_is_computed(shared: Started) -> None:
    """All three are out while the first one sleeps."""
    executor, _ = shared
    worker_group = executor._worker_group
    assert worker_group is not None
    for step in range(3):
        executor.submit(make_step_message(step, (SLEEP_MS, 1000 if step == 0 else 1)))
    assert (worker_group.phases()[0] or "").startswith(("step 0", "waiting for a step"))  # it may not have begun
    assert [executor.collect()[0].step_id for _ in range(3)] == [0, 1, 2]


def test_more_steps_than_allowed_is_a_programming_error(shared: Started) -> None:
    executor, _ = shared
    for step in range(3):  # max_inflight_steps = 2, and a flush
        executor.submit(make_step_message(step))
    with pytest.raises(AssertionError, match="in flight"):
        executor.submit(make_step_message(3))
    with pytest.raises(AssertionError, match="outstanding"):
        executor.park()
    for _ in range(3):
        executor.collect()


@pytest.mark.parametrize("size", [CAPACITY_BYTES - 200, CAPACITY_BYTES + 200, 6_000_000])
def test_messages_and_replies_of_any_size(shared: Started, size: int) -> None:
    """Also both ways at once: neither end waits for the other to read."""
    executor, _ = shared
    step_messages = [make_step_message(step, (LARGE, size // 7), padding=size) for step in range(3)]
    for step_message in step_messages:
        executor.submit(step_message)
    for step_message in step_messages:
        (output,) = executor.collect()
        assert output.sampled_token_ids.tolist() == expected_tokens(step_message)
        assert output.logprobs is not None
        assert output.logprobs[0] is not None
        assert len(output.logprobs[0].token_ids) == size // 7


def test_parked_workers_sleep_and_wake(shared: Started) -> None:
    executor, _ = shared
    (pid,) = executor.worker_pids
    for cycle in range(4):
        executor.park()
        executor.park()  # twice is once
        if cycle == 0:
            driver_before = time.process_time()
            worker_before = cpu_time_s(pid)
            limits.pause(1.0)  # one that spins would take all of it; Ray's own threads take some
            assert cpu_time_s(pid) - worker_before < 0.5
            assert time.process_time() - driver_before < 0.5
        executor.check_health()
        step_message = make_step_message(cycle, rows=5)
        executor.submit(step_message)
        executor.submit(step_message)
        for _ in range(2):
            assert executor.collect()[0].sampled_token_ids.tolist() == expected_tokens(step_message)


def test_output_may_come_a_call_later(fresh: Callable[..., Started]) -> None:
    """A worker whose device runs behind (I2): the first call brings nothing, the flush brings the rest."""
    executor, _ = fresh("compiled_graph", "DelayedWorker")
    brought = []
    for step in range(3):
        executor.submit(make_step_message(step))
        brought.append([output.step_id for output in executor.collect()])
    executor.submit(make_step_message(3, rows=0, flush=True))
    brought.append([output.step_id for output in executor.collect()])
    assert brought == [[], [0], [1], [2, 3]]


@either("compiled_graph")
def test_two_ranks(fresh: Callable[..., Started], transport: str) -> None:
    """Every rank gets every step message; outputs come from rank 0; the death of rank 1 is noticed while rank 0
    works."""
    executor, info = fresh(transport, tensor_parallel_size=2, step_timeout_s=limits.patience_s())
    assert info.num_blocks == 99  # the smaller one
    assert {"place=0,2,0", "place=1,2,1"} <= set(info.notes)
    for step in range(3):
        executor.submit(make_step_message(step))
    for step in range(3):
        (output,) = executor.collect()
        assert output.step_id == step
    assert executor.call("add_rank", 10) == [10, 11]
    executor.park()
    assert executor.call("add_rank", 5) == [20, 21]
    executor.park()
    executor.submit(make_step_message(3, (LARGE, 200_000)))
    assert executor.collect()[0].step_id == 3
    executor.submit(make_step_message(4, (SLEEP_MS, 600_000)))
    pids = executor.worker_pids
    os.kill(pids[1], signal.SIGKILL)
    with limits.soon(DETECTED_S, "notice of the death"), pytest.raises(EngineDeadError, match="rank 1"):
        executor.collect()
    executor.shutdown()
    assert gone(pids)


def test_a_rank_that_hangs_while_it_starts() -> None:
    with pytest.raises(
        EngineDeadError, match=r"worker rank 1 .*did not start within \S+ s: it hangs \(rank 0: waiting"
    ):
        start("socket", "HalfHangingWorker", tensor_parallel_size=2, start_timeout_s=limits.scaled_s(3.0))


def test_calls_between_steps(shared: Started) -> None:
    """They may take longer than a step; one that fails ends nothing."""
    executor, _ = shared
    assert executor.call("add_rank", 4, 0.5) == [25]
    with pytest.raises(ConfigError, match=r"worker rank 0: .*must not be negative"):
        executor.call("add_rank", -1)
    with pytest.raises(MantaError, match="add_rank on worker rank 0: ZeroDivisionError"):
        executor.call("add_rank", 0)
    executor.submit(make_step_message(1))
    with pytest.raises(AssertionError, match="outstanding"):
        executor.call("add_rank", 1)
    assert executor.collect()[0].sampled_token_ids.tolist() == expected_tokens(make_step_message(1))


@either("socket")
def test_failed_step_says_what_failed(fresh: Callable[..., Started], transport: str) -> None:
    executor, _ = fresh(transport)
    executor.submit(make_step_message(0))
    executor.submit(make_step_message(1, (FAIL, 0)))
    assert executor.collect()[0].step_id == 0
    with pytest.raises(EngineDeadError, match="rank 0 failed a step: RuntimeError: no luck with step 1"):
        executor.collect()
    for call in (executor.check_health, executor.park, lambda: executor.submit(make_step_message(2)), executor.collect):
        with pytest.raises(EngineDeadError, match="no luck"):
            call()


@pytest.mark.parametrize(("transport", "state"), KILLED)
def test_killed_worker_is_noticed(fresh: Callable[..., Started], transport: str, state: str) -> None:
    semaphores = graph_semaphores()
    executor, _ = fresh(transport)
    (pid,) = executor.worker_pids
    if state == "parked":
        executor.park()
    elif state == "stepping":
        executor.submit(make_step_message(0, (SLEEP_MS, 600_000)))
    os.kill(pid, signal.SIGKILL)
    notice = executor.collect if state == "stepping" else lambda: poll_health(executor)
    told = pytest.raises(EngineDeadError, match=rf"worker rank 0 \(pid {pid} on .*\) is gone")
    with limits.soon(DETECTED_S, "notice of the death"), told:
        notice()
    with pytest.raises(EngineDeadError, match="is gone"):
        executor.submit(make_step_message(1))
    with limits.soon(DETECTED_S, "the shutdown"):
        executor.shutdown()
    assert not left_semaphores(semaphores)


@either("compiled_graph")
def test_submit_to_a_worker_that_just_died(fresh: Callable[..., Started], transport: str) -> None:
    """Nobody asked for the health in between: submit or collect raises, neither waits."""
    executor, _ = fresh(transport)
    pids = executor.worker_pids
    executor.submit(make_step_message(0, (KILL, 0)))
    assert gone(pids)
    with limits.soon(DETECTED_S, "notice of the death"), pytest.raises(EngineDeadError, match="rank 0"):
        submit_and_collect(executor)


@either("socket")
def test_hung_worker_exceeds_the_step_timeout(fresh: Callable[..., Started], transport: str) -> None:
    executor, _ = fresh(transport)
    pids = executor.worker_pids
    executor.submit(make_step_message(0, (STOP, 0)))
    limits.wait_until(lambda: psutil.Process(pids[0]).status() == psutil.STATUS_STOPPED, "the stop")
    executor._config = executor._config.model_copy(update={"step_timeout_s": limits.AT_ONCE_S})
    with limits.soon(DETECTED_S, "the timeout"), pytest.raises(EngineDeadError, match=r"not answer within 0\.2 s"):
        executor.collect()
    executor.shutdown()  # the process is stopped: Ray's own kill does not reach it
    assert gone(pids)


@pytest.mark.parametrize(("transport", "state"), KILLED)
def test_workers_do_not_outlive_the_driver(ray_cluster: str, transport: str, state: str) -> None:
    semaphores = graph_semaphores()
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "driver_process.py"), ray_cluster, transport, state],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2])},
    )
    try:
        assert driver.stdout is not None
        pids = next([int(pid) for pid in line.split()[1:]] for line in driver.stdout if line.startswith("pids"))
        assert pids
        assert all(psutil.pid_exists(pid) for pid in pids)
        driver.kill()
        assert gone(pids)
        assert not left_semaphores(semaphores)  # also where the driver never took another step than the first
    finally:
        driver.kill()
        driver.wait()


@either("compiled_graph")
def test_start_and_stop_leave_nothing(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp())  # others' worker groups may be starting just now
    free = ray.available_resources()["CPU"]
    semaphores = graph_semaphores()
    executor, _ = start(transport)
    assert not left_semaphores(semaphores), "a death would leave them from now on"
    pids = executor.worker_pids
    executor.submit(make_step_message(0))
    executor.collect()
    executor.park()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.check_health()
    assert len(pids) == 1
    assert gone(pids)
    assert not os.listdir(tempfile.gettempdir())
    assert not left_semaphores(semaphores)
    limits.wait_until(lambda: ray.available_resources().get("CPU", 0) >= free, "Ray has its CPU back")


def test_worker_that_dies_in_the_first_step_leaves_nothing() -> None:
    """No rank has answered yet, so the semaphores still have their names."""
    semaphores = graph_semaphores()
    with pytest.raises(EngineDeadError, match="is gone"):
        start("compiled_graph", "DyingInWarmUpWorker")
    assert not left_semaphores(semaphores)


def test_errors_of_start_come_through() -> None:
    with pytest.raises(CheckpointError, match=r"^tensor model\.norm\.weight is missing$") as caught:
        start("socket", "BrokenWorker")
    assert caught.value.param == "model"
    with pytest.raises(EngineDeadError, match="lost before it could start"):
        start("socket", "DyingWorker")
    executor = RayWorkersExecutor(EngineConfig(), "no_such_module:Worker")
    with pytest.raises(EngineDeadError, match="no_such_module"):
        executor.start()


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0))


def unreserved_cpus() -> float:
    """The cluster's, less those of placement groups."""
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    held = sum(bundle.get("CPU", 0) for group in groups for bundle in group["bundles"].values())
    return float(ray.cluster_resources()["CPU"] - held)


def test_missing_resources_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="1 workers need 1 GPU, the Ray cluster has 0 in all"):
        start("socket", device="cuda")
    monkeypatch.setattr(placement_module, "_FREE_TIMEOUT_S", 0.5)
    # Ray's figures are late, both of a worker killed a moment ago and of a group made a moment ago.
    limits.wait_until(lambda: free_cpus() == unreserved_cpus(), "Ray has counted its CPUs")
    taken = placement_group([{"CPU": free_cpus()}])
    try:
        assert taken.wait(limits.patience_s())
        limits.wait_until(lambda: free_cpus() == 0, "Ray has counted what is taken")
        with pytest.raises(ConfigError, match=r"within 0\.5 s: they need 1 CPU \(0 free\)"):
            start("socket")
    finally:
        remove_placement_group(taken)


@contextmanager
def replica_in(bundles: list[dict[str, float]]) -> Iterator[tuple[Any, Any]]:
    """A placement group as Serve makes it, and an actor in its bundle 0."""
    group = placement_group(bundles, strategy="STRICT_PACK")
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    name = "SERVE_REPLICA::manta#Engine-m#abc"  # as Serve names its replicas
    replica = ray.remote(Replica).options(name=name, num_cpus=0.1, scheduling_strategy=strategy).remote()
    try:
        yield group, replica
    finally:
        ray.kill(replica)
        remove_placement_group(group)


def test_workers_take_the_bundles_of_the_replica() -> None:
    with replica_in([{"CPU": 0.1}, {"CPU": 1}]) as (group, replica):
        group_id, info, pids, names = ray.get(replica.run.remote("compiled_graph"), timeout=limits.patience_s())
        assert group_id == group.id.hex()
        assert f"placement group={group_id}" in info.notes
        assert gone(pids)
        assert [name for name in names if re.fullmatch(r"manta#Engine-m#abc#[0-9a-f]{8}#rank0", name)]


def test_too_few_bundles_are_an_error() -> None:
    with (
        replica_in([{"CPU": 0.1}]) as (_, replica),
        pytest.raises(ConfigError, match="has 1 bundles; 1 workers need 2") as caught,
    ):
        ray.get(replica.run.remote("socket"), timeout=limits.patience_s())
    assert caught.value.cause.param == "placement_group_bundles"  # type: ignore[attr-defined]  # Ray's wrapper
