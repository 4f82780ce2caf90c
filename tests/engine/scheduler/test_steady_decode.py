"""The fast path of decode steps: the steps are those of the plan, and nobody is forgotten beside them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from app.engine.core import EngineCore
from app.engine.scheduler.scheduler import Scheduler
from app.engine.scheduler.step_writer import StepWriter
from app.records.step import ModelRunnerOutput, SchedulerOutput
from tests.engine.core_driver import make_core, make_request
from tests.engine.scheduler.random_run import RandomRun


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """Step messages that were written without a plan."""
    written: list[SchedulerOutput] = []
    write_next = StepWriter.write_next

    def watched(writer: StepWriter, *arguments: Any) -> SchedulerOutput:
        written.append(write_next(writer, *arguments))
        return written[-1]

    monkeypatch.setattr(StepWriter, "write_next", watched)
    return written


def test_random_runs(steady: list[SchedulerOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(60):
        RandomRun(seed, monkeypatch, num_stages=1, is_plain=True).play()
    assert len(steady) > 100, len(steady)


def messages(core: EngineCore, num_steps: int, *, planned: bool) -> list[SchedulerOutput]:
    """With two in flight; `planned`: each of them by a plan."""
    scheduler, in_flight, written = core.scheduler, deque[SchedulerOutput](), []
    for step in range(num_steps):
        while len(in_flight) < 2:
            scheduler._steady = None if planned else scheduler._steady
            message = scheduler.schedule()
            assert message is not None
            in_flight.append(message)
            written.append(message)
        message = in_flight.popleft()
        tokens = np.full(int(message.samples.sum()), 17, np.int32)
        scheduler.update_from_output(ModelRunnerOutput(message.step_id, tokens))
        if step == 20:
            scheduler.abort(["r3"])
        if step in (30, 40):
            scheduler.set_paused("r5", step == 30)
        if step == 50:
            core.add_request(make_request("late", [3] * 9, max_tokens=20, ignore_eos=True))
    return written


def test_the_messages_are_those_of_the_plan(steady: list[SchedulerOutput]) -> None:
    """Block by block and step by step, while requests end, leave, are held, go on and come."""
    runs = []
    for planned in (True, False):
        core = make_core(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=500)
        for number in range(12):
            prompt = [number + 5] * (10 + number)
            core.add_request(make_request(f"r{number}", prompt, max_tokens=60 + 3 * number, ignore_eos=True))
        runs.append(messages(core, 75, planned=planned))
        assert bool(steady) is not planned
    assert len(steady) > 40
    for one, other in zip(*runs, strict=True):
        for name in ("step_id", "new_blocks", "freed_rows", "masks", "flush"):
            assert getattr(one, name) == getattr(other, name), (name, one.step_id)
        for name in ("rows", "num_scheduled_tokens", "samples"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), (name, one.step_id)


@pytest.mark.parametrize("reason", ["drafts", "stages", "grammar", "waiting"])
def test_where_each_step_needs_a_plan(reason: str, steady: list[SchedulerOutput]) -> None:
    options: dict[str, Any] = {
        "drafts": {"num_draft_tokens": 2},
        "stages": {"pipeline_parallel_size": 2, "executor": "local_processes"},
        "waiting": {"max_num_seqs": 2},
        "grammar": {},
    }[reason]
    core = make_core(**options)
    for number in range(3):
        core.add_request(make_request(f"{number}", [number + 4] * 5, max_tokens=12))
    scheduler: Scheduler = core.scheduler
    scheduler.rows.has_grammar[-1] = reason == "grammar"  # of another row
    for _ in range(5):
        core.step()
    assert not steady
