"""New weights and sleep while requests run: each answer is of one set of weights, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.async_engine import AsyncEngine
from app.engine.control import pause, weights
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.errors import CheckpointError, EngineAsleepError, InvalidRequestError
from tests import limits
from tests.engine.core_driver import KEY, make_request
from tests.engine.test_async_engine import Receiver
from tests.tiny_models import tiny_model

NUM_TOKENS = 24
NUM_REQUESTS = 12


def prompt(number: int) -> list[int]:
    return [3 + number, *range(40, 40 + 3 * number), 7]


class Running:
    def __init__(self, model: Path) -> None:
        config = EngineConfig(model=str(model), executor="in_process", num_blocks=256, num_threads=1, max_num_seqs=4)
        self.core = EngineCore(config, ModelInfo.from_directory(model), create_executor(config), KEY)
        self.receiver = Receiver()
        self.engine = AsyncEngine(self.core, self.receiver.on_outputs, self.receiver.on_fatal)
        self.engine.start()

    def ask(self, name: str, numbers: range) -> list[str]:
        ids = [f"{name}{number}" for number in numbers]
        for one, number in zip(ids, numbers, strict=True):
            self.engine.add_request(make_request(one, prompt(number), max_tokens=NUM_TOKENS, ignore_eos=True))
        return ids

    def control(self, name: str, **arguments: Any) -> Any:
        return self.engine.control(name, arguments).result(limits.patience_s())

    def assert_idle(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
        self.core.scheduler.kv.pool.check()


@pytest.fixture
def start() -> Iterator[Callable[[Path], Running]]:
    made: list[Running] = []

    def begin(model: Path) -> Running:
        made.append(Running(model))
        return made[-1]

    yield begin
    for one in made:
        one.engine.shutdown()


@cache
def tokens(seed: int) -> list[list[int]]:
    """What each prompt gets from the weights of a seed, undisturbed."""
    running = Running(tiny_model(seed=seed))
    ids = running.ask("", range(NUM_REQUESTS))
    running.receiver.wait_final(*ids)
    running.engine.shutdown()
    return [running.receiver.results.tokens[one] for one in ids]


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_each_answer_is_of_one_set_of_weights(start: Callable[[Path], Running], mode: str) -> None:
    old, new = tokens(5), tokens(6)
    assert all(a != b for a, b in zip(old, new, strict=True))
    running = start(tiny_model(seed=5))
    before = running.ask("before", range(NUM_REQUESTS))
    running.receiver.wait(lambda: len(running.receiver.results.tokens) > 1)
    revision = running.control("update_weights", path=str(tiny_model(seed=6)), mode=mode)
    assert running.engine.stats().model_revision == revision
    after = running.ask("after", range(NUM_REQUESTS))
    running.receiver.wait_final(*before, *after)
    results = running.receiver.results
    assert [results.tokens[one] for one in after] == new
    reasons = set()
    for number, one in enumerate(before):
        reasons.add(reason := results.final[one].finish_reason)
        found = results.tokens.get(one, [])
        if reason == "length":
            assert found in (old[number], new[number])
            assert mode != "wait" or found == old[number]
        else:
            assert found == old[number][: len(found)]
            assert results.final[one].error == (pause.ENDED if mode == "abort" else weights.ENDED)
    assert reasons == {"wait": {"length"}, "abort": {"error"}, "keep": {"length", "error"}}[mode]
    running.assert_idle()


@pytest.mark.parametrize("level", [1, 2])
def test_requests_that_are_kept_sleep_too(start: Callable[[Path], Running], level: int) -> None:
    running = start(tiny_model(seed=5))
    ids = running.ask("", range(NUM_REQUESTS))
    running.receiver.wait(lambda: len(running.receiver.results.tokens) > 1)
    running.control("sleep", level=level, mode="keep")
    assert running.engine.stats().refusal is not None
    assert running.engine.stats().num_cached_blocks == 0
    running.control("wake_up")
    if level == 2:
        running.control("reload_weights")
    running.receiver.wait_final(*ids)
    assert [running.receiver.results.tokens[one] for one in ids] == tokens(5)
    running.assert_idle()


def test_paused_requests_and_new_ones_go_on_afterwards(start: Callable[[Path], Running]) -> None:
    running = start(tiny_model(seed=5))
    first = running.ask("", range(4))
    running.receiver.wait(lambda: running.receiver.results.tokens)
    running.control("pause", mode="keep")
    assert running.control("describe")["is_paused"]
    second = running.ask("", range(4, NUM_REQUESTS))
    assert not running.receiver.results.final.keys() & set(second)
    running.control("reset_prefix_cache")
    running.control("resume")
    running.receiver.wait_final(*first, *second)
    assert [running.receiver.results.tokens[one] for one in (*first, *second)] == tokens(5)
    running.assert_idle()


def test_requests_that_come_while_weights_are_read_wait_for_them(
    start: Callable[[Path], Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were they refused, a fleet whose replicas all get new weights at once would refuse everybody."""
    running = start(tiny_model(seed=5))
    call_workers, during = running.core.call_workers, []

    def call(method: str, *arguments: Any) -> list[Any]:
        if method == "load_directory":
            during.append(running.engine.stats().refusal)
            during.extend(running.ask("during", range(2)))
        return call_workers(method, *arguments)

    monkeypatch.setattr(running.core, "call_workers", call)
    running.control("update_weights", path=str(tiny_model(seed=6)))
    refusal, *ids = during
    assert refusal is None
    running.receiver.wait_final(*ids)
    assert [running.receiver.results.tokens[one] for one in ids] == tokens(6)[:2]


def test_they_are_refused_once_reading_has_failed(
    start: Callable[[Path], Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(tiny_model(seed=5))
    call_workers = running.core.call_workers

    def call(method: str, *arguments: Any) -> list[Any]:
        if method == "load_directory":
            raise InvalidRequestError("the disk is gone")
        return call_workers(method, *arguments)

    monkeypatch.setattr(running.core, "call_workers", call)
    with pytest.raises(InvalidRequestError, match="the disk is gone"):
        running.control("update_weights", path=str(tiny_model(seed=6)))
    with pytest.raises(EngineAsleepError, match="no weights"):
        running.ask("after", range(1))
    monkeypatch.undo()
    running.control("reload_weights")
    running.receiver.wait_final(*running.ask("", range(2)))
    assert [running.receiver.results.tokens[str(one)] for one in range(2)] == tokens(5)[:2]


def test_they_are_refused_once_a_part_of_a_transfer_has_failed(start: Callable[[Path], Running]) -> None:
    running = start(tiny_model(seed=5))
    running.control("start_weight_update", mode="abort")
    assert running.engine.stats().refusal is None
    with pytest.raises(InvalidRequestError, match="init_weight_transfer_engine"):
        running.control("receive_weights", names=["lm_head.weight"], dtype_names=["float32"], shapes=[[1]])
    with pytest.raises(EngineAsleepError, match="no weights"):
        running.ask("", range(1))


@pytest.mark.parametrize("path", ["organisation/name", "tiny-chat", "", "."])
def test_a_path_is_no_name_of_a_model(path: str, start: Callable[[Path], Running], monkeypatch: Any) -> None:
    monkeypatch.setattr("app.checkpoints.model_info.fetch_description", None)  # nothing is asked of a hub
    running = start(tiny_model())
    with pytest.raises(CheckpointError, match="absolute path of a directory"):
        running.control("check_weights", path=path)
