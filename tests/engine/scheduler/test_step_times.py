"""What who decodes feels of others' prompts, on a machine whose steps take simulated time."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from app.config.engine import EngineConfig
from app.engine.assembly import GPU_STEP_S
from app.engine.core import EngineCore
from app.records.step import ModelRunnerOutput, SchedulerOutput
from tests.engine.core_driver import KEY, fake_info, make_request
from tests.engine.fake_executor import FakeExecutor

RATE, SECONDS, PROMPT, OUTPUT = 22.0, 8.0, 1024, 64  # seven tenths of what the machine can do
CONFIG = {"block_size": 16, "max_num_batched_tokens": 8192, "max_num_seqs": 256, "enable_prefix_caching": False}


class Machine(FakeExecutor):
    """About as quick as an 8B model on an H200: a step reads the weights once, multiplies each token, and is sometimes
    slower than it mostly is. `now` is the time by which the last outputs came; `launches_s`: what the host takes to
    launch a step with prompts, however few tokens it has."""

    def __init__(self, launches_s: float) -> None:
        super().__init__(6000, CONFIG["block_size"], late=True, max_num_batched_tokens=CONFIG["max_num_batched_tokens"])
        self.now = self._free = 0.0
        self._ends: deque[tuple[int, float]] = deque()
        self._rng, self._launches_s = random.Random(5), launches_s

    def execute(self, step_message: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(step_message)
        if step_message.num_tokens:
            has_prompts = bool((step_message.num_scheduled_tokens > 1).any())
            took = 0.0006 + max(0.0039, 2.35e-5 * step_message.num_tokens) + 0.002 * has_prompts
            took = max(took, self._launches_s * has_prompts)
            output.step_time_s = took * (1.0 + 0.06 * abs(self._rng.gauss(0.0, 1.0)))
            self._free = max(self._free, self.now) + output.step_time_s
            self._ends.append((step_message.step_id, self._free))
        return output

    def collect(self) -> list[ModelRunnerOutput]:
        outputs = super().collect()
        for output in outputs:
            while self._ends and self._ends[0][0] <= output.step_id:
                self.now = self._ends.popleft()[1]
        return outputs


Seconds = np.ndarray[tuple[int], np.dtype[np.float64]]


def waits_s(max_step_s: float | None, launches_s: float = 0.0, rate: float = RATE) -> tuple[Seconds, Seconds]:
    """Times to the first token, and between tokens, of all requests, which come at random."""
    machine, rng = Machine(launches_s), random.Random(0)
    config = EngineConfig(**CONFIG, max_step_s=max_step_s)
    core = EngineCore(config, fake_info(), machine, KEY)
    core.start()
    due, came, sent = 0.0, dict[str, list[float]](), list[float]()
    while due < SECONDS or core.has_work():
        while due < SECONDS and (due <= machine.now or not core.has_work()):
            machine.now, name = max(machine.now, due), f"r{len(came)}"
            came[name] = []
            sent.append(due)
            core.add_request(make_request(name, [rng.randrange(900) for _ in range(PROMPT)], max_tokens=OUTPUT))
            due += rng.expovariate(rate)
        for output in core.step():
            came[output.request_id] += [machine.now] * len(output.new_token_ids)
    first = np.array([times[0] for times in came.values()]) - np.array(sent)
    return first, np.concatenate([np.diff(times) for times in came.values()])


def test_gaps_between_tokens_keep_the_objective() -> None:
    """But for a prompt that would be cut shortly before its end. Where steps take as long as their tokens do, some are
    twice as long."""
    assert np.quantile(waits_s(None)[1], 0.99) < 1.25 * GPU_STEP_S
    assert np.quantile(waits_s(0.0)[1], 0.99) > 2.0 * GPU_STEP_S


@pytest.mark.parametrize(("launches_s", "rate", "times"), [(0.019, RATE, 1.1), (0.062, 8.0, 1.5)])
def test_where_shorter_steps_are_no_quicker_prompts_wait_no_longer_for_them(
    launches_s: float, rate: float, times: float
) -> None:
    """As an 8B model's without captured prefills on an H200, and one of 35B with many layers. Steps cut to what the
    average token takes would be twice as many, and a prompt would wait for two."""
    first, gaps = waits_s(None, launches_s, rate)
    unbounded, gaps_of_those = waits_s(0.0, launches_s, rate)
    assert np.median(first) < times * np.median(unbounded)
    assert np.quantile(gaps, 0.99) < 1.1 * max(launches_s, np.quantile(gaps_of_those, 0.99))
