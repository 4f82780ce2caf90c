"""Worker groups of local processes: they live and die as one, and say which rank was where. Workers without a model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.config.engine import EngineConfig
from app.engine.executor import create_executor
from app.engine.executor.local_processes import LocalProcessesExecutor
from app.engine.executor.worker_group import signs_of_life
from app.errors import CheckpointError, ConfigError, EngineDeadError
from tests import limits
from tests.engine.executor.fake_worker import FAIL, ONLY_RANK, SLEEP_MS, expected_tokens, make_step_message
from tests.engine.executor.forked_executor import ForkedExecutor

ROOT = Path(__file__).resolve().parents[3]
DETECTED_S = 10.0  # the aim is 1 s


@pytest.fixture
def fresh() -> Iterator[Callable[..., ForkedExecutor]]:
    """Starts worker groups of fake workers, four ranks by default, and ends them."""
    made: list[ForkedExecutor] = []

    def make(worker: str = "FakeWorker", **options: Any) -> ForkedExecutor:
        sizes = {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "step_timeout_s": limits.patience_s(),
            **options,
        }
        config = EngineConfig(executor="local_processes", **sizes)
        made.append(ForkedExecutor(config, f"tests.engine.executor.fake_worker:{worker}"))
        made[-1].start()
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()


def gone(pids: list[int]) -> bool:
    """Whether all have ended, or do soon."""
    return bool(limits.wait_until(lambda: not any(map(runs, pids)), f"the end of {pids}", DETECTED_S))


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != "zombie")
    return False


def hurry(executor: ForkedExecutor, **seconds: float) -> None:
    """Other limits from now on: short ones would end a worker group that only starts slowly."""
    executor._config = executor._config.model_copy(update=seconds)


def until_phase(executor: ForkedExecutor, *expected: str) -> None:
    """Wait until each rank says that it is at what is expected of it; "": it may say nothing."""
    worker_group = executor._worker_group
    assert worker_group is not None
    limits.wait_until(
        lambda: all(
            (phase or "").startswith(start)
            for phase, start in zip(worker_group.phases().values(), expected, strict=True)
        ),
        f"the phases {expected}",
    )


def test_step_messages_go_to_all_and_outputs_come_from_the_last_stage(fresh: Callable[..., ForkedExecutor]) -> None:
    executor = fresh()
    pids = executor.worker_pids
    assert len(set(pids)) == 4
    step_messages = [make_step_message(step) for step in range(4)]
    for step_message in step_messages:
        executor.submit(step_message)
    for step_message in step_messages:
        (output,) = executor.collect()
        assert output.sampled_token_ids.tolist() == expected_tokens(step_message)
    executor.park()
    executor.check_health()
    executor.shutdown()
    assert gone(pids)
    with pytest.raises(EngineDeadError, match="was shut down"):
        executor.submit(step_messages[0])


def test_a_call_longer_than_a_step_and_one_that_never_ends(fresh: Callable[..., ForkedExecutor]) -> None:
    executor = fresh()
    hurry(executor, step_timeout_s=limits.AT_ONCE_S)
    assert executor.call("add_rank", 10, 2 * limits.AT_ONCE_S) == [10, 11, 12, 13]
    hurry(executor, start_timeout_s=limits.scaled_s(1.0))
    with pytest.raises(EngineDeadError, match=r"hangs \(rank 0: add_rank for"):
        executor.call("add_rank", 10, 600.0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_ends_the_worker_group(fresh: Callable[..., ForkedExecutor]) -> None:
    """Its answer would be taken for the next step's."""
    executor, main = fresh(), threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until_phase(executor, *["add_rank"] * 4)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        executor.call("add_rank", 10, 600.0)
    interrupter.join()
    with pytest.raises(EngineDeadError, match="add_rank was interrupted"):
        executor.submit(make_step_message(0))


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_takes_the_worker_group_with_it(fresh: Callable[..., ForkedExecutor], victim: int) -> None:
    executor = fresh()
    pids = executor.worker_pids
    executor.submit(make_step_message(0, (ONLY_RANK, (victim + 1) % 4), (SLEEP_MS, 600_000)))
    os.kill(pids[victim], signal.SIGKILL)
    told = pytest.raises(EngineDeadError, match=rf"worker rank {victim} \(pid {pids[victim]} .*is gone")
    with limits.soon(DETECTED_S, "notice of the death"), told:
        executor.collect()
    assert gone(pids), "a rank outlives its worker group"  # before anybody calls shutdown
    with pytest.raises(EngineDeadError, match="is gone"):
        executor.check_health()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_stopped_rank_is_named_and_does_not_survive(fresh: Callable[..., ForkedExecutor], victim: int) -> None:
    executor = fresh()
    pids = executor.worker_pids
    os.kill(pids[victim], signal.SIGSTOP)
    executor.submit(make_step_message(0))
    until_phase(executor, *("" if rank == victim else "waiting for a step" for rank in range(4)))
    hurry(executor, step_timeout_s=limits.AT_ONCE_S)
    with pytest.raises(EngineDeadError) as caught:
        executor.collect()
    message = caught.value.message
    assert message.startswith(f"worker rank {victim} (pid {pids[victim]} ")
    assert "did not answer within 0.2 s: it hangs" in message
    assert f"rank {victim}: no sign of life" in message
    assert f"rank {1 if victim != 1 else 2}: waiting for a step" in message
    assert gone(pids)


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_stopped_rank_is_found_long_before_the_step_timeout(
    fresh: Callable[..., ForkedExecutor], monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(signs_of_life, "ASK_INTERVAL_S", 0.05)
    executor = fresh()
    pids = executor.worker_pids
    if busy:  # a step that takes long is no reason
        executor.submit(make_step_message(0, (SLEEP_MS, 600_000)))
    for _ in range(2 * signs_of_life.MAX_UNANSWERED):
        executor.check_health()
        limits.pause(0.05)
    os.kill(pids[2], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=rf"worker rank 2 \(pid {pids[2]} .* gives no sign of life"):
        limits.wait_until(executor.check_health, "the notice")
    assert gone(pids)


def test_a_step_that_is_given_up_says_what_the_ranks_do(fresh: Callable[..., ForkedExecutor]) -> None:
    executor = fresh()
    pids = executor.worker_pids
    executor.submit(make_step_message(7, (ONLY_RANK, 2), (SLEEP_MS, 600_000)))
    until_phase(executor, *["waiting for a step"] * 2, "step 7", "waiting for a step")
    with pytest.raises(EngineDeadError, match=r"took too long \(.*rank 2: step 7 for \d+\.\d s"):
        executor.give_up_step("took too long")
    assert gone(pids)


def test_a_rank_that_hangs_says_where(fresh: Callable[..., ForkedExecutor]) -> None:
    executor = fresh()
    executor.submit(make_step_message(7, (ONLY_RANK, 2), (SLEEP_MS, 600_000)))
    until_phase(executor, *["waiting for a step"] * 2, "step 7", "waiting for a step")
    hurry(executor, step_timeout_s=limits.AT_ONCE_S)
    with pytest.raises(EngineDeadError, match=r"worker rank 2 .* it hangs \(.*rank 2: step 7 for \d+\.\d s"):
        executor.collect()


def test_a_failure_is_told_while_others_are_busy(fresh: Callable[..., ForkedExecutor]) -> None:
    executor = fresh()
    pids = executor.worker_pids
    executor.submit(make_step_message(3, (ONLY_RANK, 1), (FAIL, 0)))
    executor.submit(make_step_message(4, (SLEEP_MS, 600_000)))
    told = pytest.raises(EngineDeadError, match="worker rank 1 failed a step: RuntimeError: no luck with step 3")
    with limits.soon(DETECTED_S, "notice of the failure"), told:
        executor.collect()
    assert gone(pids)


def test_start_errors_come_through(fresh: Callable[..., ForkedExecutor]) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        fresh("HalfBrokenWorker")
    with pytest.raises(EngineDeadError, match="a worker was lost before it could start: worker rank"):
        fresh("DyingWorker")
    with pytest.raises(EngineDeadError, match="has no attribute 'NoSuchWorker'"):
        fresh("NoSuchWorker")


def test_a_rank_that_hangs_while_it_starts(fresh: Callable[..., ForkedExecutor]) -> None:
    with pytest.raises(EngineDeadError, match=r"worker rank 1 .* hangs \(rank 0: waiting.*; rank 1: starting for"):
        fresh("HalfHangingWorker", start_timeout_s=limits.scaled_s(2.0))


def test_only_the_socket_transport() -> None:
    config = EngineConfig(executor="local_processes", tensor_parallel_size=2, step_transport="compiled_graph")
    executor = create_executor(config)
    assert isinstance(executor, LocalProcessesExecutor)
    with pytest.raises(ConfigError, match="needs executor=ray_workers"):
        executor.start()


SCRIPT = """
from app import LLM, SamplingParams
llm = LLM("tiny-chat", tensor_parallel_size=2, device="cpu", num_threads=1, kv_cache_memory_bytes=32 << 20)
text = llm.generate("The capital of France", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0]
print("pids", *llm._core.executor.worker_pids, flush=True)
print(text.token_ids, flush=True)
input()
"""


def test_a_script_without_a_main_guard_and_nothing_is_left_when_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()[1:]]
        token_ids = process.stdout.readline()
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        os.kill(pids[1], signal.SIGSTOP)  # it cannot watch any more
        process.kill()
    assert gone(pids)
    from app import LLM, SamplingParams

    with LLM("tiny-chat", device="cpu", num_threads=1, kv_cache_memory_bytes=32 << 20) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        alone = llm.generate("The capital of France", params, use_tqdm=False)[0].outputs[0]
    assert str(alone.token_ids) == token_ids.strip()


THREAD = """
import threading
from app import LLM, SamplingParams
llm = LLM("tiny-chat", tensor_parallel_size=2, device="cpu", num_threads=1, kv_cache_memory_bytes=32 << 20)
def generate():
    threading.main_thread().join()
    print(len(llm.generate("The capital of France", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)))
threading.Thread(target=generate).start()
"""


def test_threads_go_on_after_the_main_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(THREAD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=limits.patience_s(),
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_starts_and_stops_leave_nothing_behind() -> None:
    from app import LLM, SamplingParams

    params, process = SamplingParams(temperature=0, max_tokens=8), psutil.Process()
    answers, left = set(), []
    for _ in range(100):
        with LLM(
            "tiny-chat", tensor_parallel_size=2, device="cpu", num_threads=1, kv_cache_memory_bytes=32 << 20
        ) as llm:
            (choice,) = llm.generate("The capital of France", params, use_tqdm=False)[0].outputs
            answers.add(tuple(choice.token_ids))
            pids = llm._core.executor.worker_pids
        assert gone(pids)
        left.append((process.num_fds(), len(os.listdir("/dev/shm")), process.memory_info().rss >> 20))
    assert len(answers) == 1
    (fds, segments, mib), (last_fds, last_segments, last_mib) = left[9], left[-1]
    assert (last_fds, last_segments) == (fds, segments)
    assert last_mib < mib + 16, left
