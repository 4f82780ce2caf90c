"""The in-process executor keeps the order of step messages and says when it is dead."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from app.config.engine import EngineConfig
from app.engine.executor import create_executor
from app.engine.executor.in_process import InProcessExecutor
from app.errors import CheckpointError, EngineDeadError
from app.kernels import compile_processes
from app.records.request import EngineRequest
from app.records.step import NewRequest, SchedulerOutput
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import greedy

PROMPT = [random.Random(5).randrange(3, 331) for _ in range(12)]


def config(model: str) -> EngineConfig:
    return EngineConfig(model=model, executor="in_process", device="cpu", num_threads=1, num_blocks=8, max_num_seqs=2)


def step(step_id: int, tokens: int, new: bool = False) -> SchedulerOutput:
    ids = np.array(PROMPT, dtype=np.int32)
    requests = [NewRequest(0, ids, len(ids), 0, [3, 5], EngineRequest("r", [], greedy(8)), ())] if new else []
    return SchedulerOutput(
        step_id, np.array([0], dtype=np.int32), np.array([tokens], dtype=np.int32), np.array([True]), requests
    )


def test_several_steps_before_the_first_is_collected() -> None:
    directory = tiny_model("llama")
    executor = create_executor(config(str(directory)))
    assert isinstance(executor, InProcessExecutor)
    assert executor.start().num_blocks == 8
    executor.submit(step(0, len(PROMPT), new=True))
    for i in range(1, 5):
        executor.submit(step(i, 1))
    outputs = [executor.collect() for _ in range(5)]
    assert [[output.step_id for output in one] for one in outputs] == [[0], [1], [2], [3], [4]]
    tokens = [int(one[0].sampled_token_ids[0]) for one in outputs]
    assert tokens == hf_greedy(hf_model(directory), PROMPT, 5)
    executor.park()
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="not running"):
        executor.submit(step(5, 1))


def test_a_failed_step_is_the_end() -> None:
    executor = create_executor(config(str(tiny_model("llama"))))
    executor.start()
    with pytest.raises(EngineDeadError, match="step 4 failed in the worker"):
        executor.submit(step(4, 1))  # its row was never entered
    for call in (executor.check_health, executor.collect):
        with pytest.raises(EngineDeadError, match="step 4 failed"):
            call()
    executor.shutdown()


def test_start_errors_come_through() -> None:
    with pytest.raises(CheckpointError, match="no such path"):
        create_executor(config("/nowhere/at/all")).start()


def test_a_start_that_fails_leaves_no_process_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    for name in ("begin", "end"):
        monkeypatch.setattr(compile_processes, name, partial(calls.append, name))
    with pytest.raises(CheckpointError):
        create_executor(config("/nowhere/at/all")).start()
    assert calls[0] == "begin"
    assert calls[-1] == "end"
