"""Steps with prompts that are captured once they came several times, with a CUDA that only remembers; and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.worker.graphs import prompts_as_used
from app.worker.graphs.prompt_graphs import PromptGraphs
from app.worker.graphs.prompt_step import PromptKey, PromptStep
from app.worker.graphs.prompts_as_used import USES, PromptsAsUsed
from app.worker.graphs.recording import Recorder
from app.worker.rows import pending_step
from tests.tiny_models import tiny_model
from tests.worker.graphs.test_cuda_graphs import FakeCuda
from tests.worker.graphs.test_prompt_graphs import set_up
from tests.worker.graphs.test_prompt_step import FAMILIES, GROUPS, runs
from tests.worker.worker_driver import Driver

CPU = torch.device("cpu")
Prepared = tuple[Driver, PromptsAsUsed, list[PromptKey]]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """A worker whose steps with prompts are captured as they come, by noting them; those that were."""
    cuda, captured = FakeCuda(monkeypatch), list[PromptKey]()

    def capture(prompts: PromptGraphs, keys: Sequence[PromptKey]) -> None:
        for key in keys:
            captured.append(key)
            prompts.step.pad_all(key)
            prompts.step.run(key)  # as before a capture
            prompts.replays[key] = partial(prompts.step.run, key)

    monkeypatch.setattr(PromptGraphs, "capture", capture)
    monkeypatch.setattr(prompts_as_used, "waits", lambda *_: True)
    driver = Driver(str(tiny_model("llama")), num_blocks=64)
    runner = driver.worker._runner
    assert runner is not None
    prompts = PromptsAsUsed(PromptStep(runner._forward, runner._state, 256), Recorder(CPU), unused=0.1)
    runner._prompts = prompts
    assert cuda.free > prompts_as_used.LEAST_FREE_BYTES
    return driver, prompts, captured


def lone(driver: Driver, tokens: int) -> list[int]:
    """A prompt alone, and its first token."""
    (run,) = driver.run(runs([tokens], max_tokens=1))
    return run.tokens


def test_captured_when_it_comes_once_more(prepared: Prepared) -> None:
    driver, prompts, captured = prepared
    expected = lone(driver, 70)
    for _ in range(USES - 2):
        assert lone(driver, 70) == expected
    assert captured == prompts.missing == []
    for _ in range(3):
        assert lone(driver, 70) == expected
    assert captured == [PromptKey(128, 1)]
    lone(driver, 30)
    assert len(captured) == 1, "of another size, which came once"


def test_tokens_are_those_of_ordinary_steps(prepared: Prepared) -> None:
    """Alone, several at once, in chunks beside rows that decode: before, at and behind the captures."""
    driver, prompts, captured = prepared
    driver.worker._runner._prompts = None  # type: ignore[union-attr]
    expected = [[run.tokens for run in driver.run(runs(group))] for group in GROUPS]
    driver.worker._runner._prompts = prompts  # type: ignore[union-attr]
    for driver.chunk in (10_000, 48):
        for _ in range(USES + 1):
            assert [[run.tokens for run in driver.run(runs(group))] for group in GROUPS] == expected
    assert len(captured) == len(set(captured)) > 1
    assert {key.decodes > 0 for key in captured} == {False, True}


def test_where_the_device_does_not_wait_none_of_so_many_tokens_is(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _, captured = prepared
    asked = []

    def waits(_: PromptStep, key: PromptKey, __: torch.device) -> bool:
        asked.append(key.tokens)
        return key.tokens < 128

    monkeypatch.setattr(prompts_as_used, "waits", waits)
    for tokens in (100, 128, 250, 40):
        for _ in range(USES + 2):
            lone(driver, tokens)
    assert asked == [128, 64], "once, and of no larger ones"
    assert captured == [PromptKey(64, 1)]


def test_none_without_room(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, captured = prepared
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (prompts_as_used.LEAST_FREE_BYTES - 1, 1 << 34))
    for _ in range(USES + 2):
        lone(driver, 70)
    assert captured == []


@pytest.mark.parametrize(("unused", "count"), [(0.1, 2), (0.02, 1), (0.0, 0)])
def test_they_leave_the_largest_step_its_memory(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, unused: float, count: int
) -> None:
    """They take 2 % of the device, or half of what the KV cache's sizing left; what torch keeps hides what one took."""
    driver, first, captured = prepared
    kept = [1 << 30]  # by torch, of steps before

    def free(_: object) -> tuple[int, int]:
        return (1 << 33) - kept[-1] - len(captured) * (200 << 20), 1 << 34

    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.append(0))
    driver.worker._runner._prompts = PromptsAsUsed(first.step, Recorder(CPU), unused)  # type: ignore[union-attr]
    for tokens in (250, 70, 30):
        for _ in range(USES + 1):
            kept.append((1 << 30) - len(captured) * (200 << 20))
            lone(driver, tokens)
    assert len(captured) == count


def test_a_capture_is_not_the_time_of_its_step(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which the scheduler plans the next ones."""
    driver, _, captured = prepared
    times: list[float] = []
    monkeypatch.setattr(pending_step, "time", SimpleNamespace(perf_counter=lambda: 1000.0 * len(captured)))
    execute = driver.worker.execute

    def timed(step: SchedulerOutput) -> list[ModelRunnerOutput]:
        outputs = execute(step)
        times.extend(output.step_time_s for output in outputs)
        return outputs

    monkeypatch.setattr(driver.worker, "execute", timed)
    for _ in range(USES + 1):
        lone(driver, 70)
    assert captured == [PromptKey(128, 1)]
    assert set(times) == {0.0}


def test_behind_a_capture_that_fails_steps_go_on_without(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, _, captured = prepared
    expected, failed = lone(driver, 70), []

    def capture(_: PromptGraphs, keys: Sequence[PromptKey]) -> None:
        failed.extend(keys)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PromptGraphs, "capture", capture)
    for tokens in (70, 30):
        for _ in range(USES + 2):
            found = lone(driver, tokens)
            assert tokens != 70 or found == expected
    assert failed == [PromptKey(128, 1)]
    assert captured == []


def test_a_start_captures_nothing_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither memory is kept nor a step timed, and idle time has none to capture."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    monkeypatch.setattr("app.worker.graphs.prompt_graphs.refusal", lambda *_: None)
    monkeypatch.setattr(PromptStep, "run", lambda *_: 1 / 0)
    driver = Driver(str(tiny_model("llama")), num_blocks=64)
    with torch.inference_mode():
        without = set_up(driver, cuda_graph_prompt_tokens=0)
        setup = set_up(driver, cuda_graph_prompt_tokens="as_used")
        assert setup.reserve() == without.reserve()
        setup.capture()
        without.capture()
    assert isinstance(setup.prompts, PromptsAsUsed)
    assert setup.num_missing == without.num_missing
    assert setup.note.endswith("; those of steps with prompts as they come")


def test_where_there_can_be_none_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    driver = Driver(str(tiny_model("llama")), num_blocks=64)
    with torch.inference_mode():
        setup = set_up(driver, cuda_graph_prompt_tokens="as_used")
        setup.capture()
    assert setup.prompts is None
    assert setup.note.endswith("; steps with prompts: none (layers that plan such steps on the host)")


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_on_a_gpu_between_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps before it are out, whose outputs come as they were."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(prompts_as_used, "waits", lambda *_: True)
    name, changes = FAMILIES[family]
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graphs": "on", "max_num_seqs": 24}
    driver = Driver(str(tiny_model(name, **changes)), num_blocks=200, cuda_graph_prompt_tokens="as_used", **options)
    runner = driver.worker._runner
    assert runner is not None
    prompts, runner._prompts = runner._prompts, None
    assert isinstance(prompts, PromptsAsUsed)
    expected = [[run.tokens for run in driver.run(runs(group))] for group in GROUPS]
    runner._prompts = prompts
    for driver.chunk in (10_000, 48):
        for _ in range(USES + 1):
            assert [[run.tokens for run in driver.run(runs(group))] for group in GROUPS] == expected
    assert {key.decodes > 0 for key in prompts.replays} == {False, True}
