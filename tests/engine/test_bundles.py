"""Several prompts in one request: one output, whatever order their own come in, and one end (I7)."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.bundles import Bundles
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.records.bundle import bundled
from app.records.outputs import EngineOutput, PooledResult
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from tests import limits
from tests.tiny_encoders import tiny_encoder


def result(number: int) -> PooledResult:
    return PooledResult.of(np.full(2, number, np.float32))


def ended(part: str, number: int) -> EngineOutput:
    return EngineOutput(part, [], "stop", pooled=result(number), num_cached_tokens=1)


@pytest.mark.parametrize("seed", range(8))
def test_results_come_together_in_the_order_of_the_prompts(seed: int) -> None:
    """Two bundles and a request by itself, whose outputs come in any order and over any number of steps."""
    rng = random.Random(seed)
    bundles = Bundles()
    names = {name: [f"{name}#{i}" for i in range(rng.randint(2, 9))] for name in ("a", "b")}
    for name, parts in names.items():
        bundles.add(name, parts)
    outputs = [ended(part, i) for parts in names.values() for i, part in enumerate(parts)]
    outputs.append(ended("alone", 7))
    rng.shuffle(outputs)
    shown: list[EngineOutput] = []
    while outputs:
        count = rng.randint(1, 4)
        step, outputs = outputs[:count], outputs[count:]
        came, left = bundles.gather(step)
        shown += came
        assert not left
    found = {output.request_id: output for output in shown}
    assert len(found) == len(shown) == 3
    assert found["alone"].pooled == result(7)
    for name, parts in names.items():
        assert found[name].bundled == [result(i) for i in range(len(parts))]
        assert found[name].finish_reason == "stop"
        assert found[name].pooled is None
        assert found[name].num_cached_tokens == len(parts)
    assert bundles.gather([ended("later", 0)])[0][0].request_id == "later"


def test_a_part_that_fails_ends_the_bundle_once() -> None:
    bundles = Bundles()
    bundles.add("a", ["a#0", "a#1", "a#2", "a#3"])
    assert bundles.running(["x", "a"]) == ["x", "a#0", "a#1", "a#2", "a#3"]
    assert bundles.gather([ended("a#1", 1)]) == ([], [])
    assert bundles.running(["a"]) == ["a#0", "a#2", "a#3"]
    late = EngineOutput("a#2", [], "error", error="too late", is_late=True)
    (shown,), left = bundles.gather([late, EngineOutput("a#3", [], "error", error="another")])
    assert (shown.request_id, shown.finish_reason, shown.error, shown.is_late) == ("a", "error", "too late", True)
    assert {"a#0"} <= set(left) <= {"a#0", "a#3"}
    assert bundles.gather([EngineOutput("a#0", [], "abort")]) == ([], [])
    assert bundles.running(["a"]) == ["a"]
    bundles.add("a", ["a#0", "a#1"])  # the name is free again
    assert bundles.gather([ended("a#1", 1), ended("a#0", 0)])[0][0].bundled == [result(0), result(1)]


class Answers:
    """Final outputs, by request."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.found: dict[str, list[EngineOutput]] = {}

    def take(self, outputs: list[EngineOutput]) -> None:
        with self.condition:
            for output in outputs:
                self.found.setdefault(output.request_id, []).append(output)
            self.condition.notify_all()

    def wait(self, *names: str) -> None:
        with self.condition:
            assert self.condition.wait_for(lambda: set(names) <= self.found.keys(), limits.patience_s())


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(5, 90) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def requests(name: str, given: list[list[int]]) -> list[EngineRequest]:
    return [EngineRequest(f"{name}{i}", ids, PoolingParams(task="token_embed")) for i, ids in enumerate(given)]


def engine_of(directory: Path, answers: Answers) -> AsyncEngine:
    config = EngineConfig(
        model=str(directory), runner="pooling", executor="in_process", num_threads=1, device="cpu", max_num_seqs=4
    )
    core = EngineCore(config, ModelInfo.of(config), create_executor(config), b"a secret for tests")
    return AsyncEngine(core, answers.take, lambda error: None)


def test_an_engine_gives_a_bundle_what_it_gives_each_prompt() -> None:
    """Beside requests by themselves; one that is aborted ends once, and leaves nothing behind."""
    answers = Answers()
    engine = engine_of(tiny_encoder("bert"), answers)
    engine.start()
    try:
        given = prompts(23, seed=1)
        for one in requests("alone", given):
            engine.add_request(one)
        engine.add_request(bundled(requests("bundle", given)))
        engine.add_request(bundled(requests("gone", prompts(40, seed=2))))
        engine.abort(["gone0"])
        answers.wait("bundle0", "gone0", *(f"alone{i}" for i in range(23)))
        limits.wait_until(lambda: not (engine.stats().num_running or engine.stats().num_waiting), "nothing to run")
    finally:
        engine.shutdown()
    assert all(len(outputs) == 1 for outputs in answers.found.values())
    assert len(answers.found) == 25
    (whole,) = answers.found["bundle0"]
    assert whole.bundled is not None
    for i, (one, ids) in enumerate(zip(whole.bundled, given, strict=True)):
        (alone,) = answers.found[f"alone{i}"]
        assert alone.pooled is not None
        assert one.shape == alone.pooled.shape == (len(ids), 48)
        np.testing.assert_allclose(one.array(), alone.pooled.array(), atol=1e-5)
