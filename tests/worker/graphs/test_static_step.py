"""Steps over static tensors, run uncaptured on the CPU: the tokens of transformers and of ordinary steps."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from app.config.engine import EngineConfig
from app.distributed.parallel_groups import RankGroup
from app.errors import ConfigError
from app.records.sampling_params import SamplingParams
from app.records.step import SchedulerOutput
from app.worker.graphs.cuda_graphs import graph_sizes
from app.worker.graphs.graph_setup import GraphSetup, refusal
from app.worker.graphs.static_step import StaticStep, StepKey
from app.worker.rows import pending_step
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, decode_statically, greedy


class Counted(StaticStep):
    """Counts what ran."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.forwards: list[int] = []
        self.samples: list[int] = []

    def forward(self, key: StepKey) -> None:
        super().forward(key)
        self.forwards.append(key.size)

    def sample(self, key: StepKey) -> None:
        super().sample(key)
        self.samples.append(key.size)


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def reference(directory: Path) -> PreTrainedModel:
    return hf_model(directory)


def static(driver: Driver, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Make the driver's worker decode as a GPU's would, without the capture."""
    step = decode_statically(driver.worker, sizes, kind=Counted)
    assert isinstance(step, Counted)
    return step


def set_up(driver: Driver, tp: RankGroup | None = None, **options: Any) -> GraphSetup:
    runner = driver.worker._runner
    assert runner is not None
    parts = (runner._forward, runner._state, tp or RankGroup(), runner._features)
    return GraphSetup(EngineConfig(**options), *parts, shares_prefixes=False)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 331) for _ in range(3 + 11 * i)] for i in range(count)]


def runs(params: list[SamplingParams]) -> list[Run]:
    return [Run(prompt, p) for prompt, p in zip(prompts(len(params)), params, strict=True)]


def test_greedy_tokens_equal_transformers(
    directory: Path, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of unequal length end one by one: sizes 8, 4, 2 and 1, with padding; prompts come in chunks."""
    driver = Driver(str(directory), chunk=16, num_blocks=64)
    step = static(driver, [1, 2, 4, 8], monkeypatch)
    lengths = [4, 9, 6, 12, 7, 15]
    done = driver.run(runs([greedy(n) for n in lengths]))
    for run, prompt, length in zip(done, prompts(6), lengths, strict=True):
        assert run.tokens == hf_greedy(reference, prompt, length)
    assert set(step.forwards) == {1, 2, 4, 8}
    assert step.samples == step.forwards


MIXED = [
    greedy(12),
    SamplingParams(temperature=0.9, seed=11, max_tokens=14),
    SamplingParams(temperature=1.3, top_p=0.8, seed=12, max_tokens=9),
    SamplingParams(temperature=0.7, top_k=5, seed=13, max_tokens=11),
    SamplingParams(temperature=1.0, min_p=0.1, seed=2**63 - 1, max_tokens=13),
]


def test_sampled_tokens_equal_ordinary_steps(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(str(directory), num_blocks=64)
    expected = [run.tokens for run in driver.run(runs(MIXED))]
    step = static(driver, [3, 8], monkeypatch)
    assert [run.tokens for run in driver.run(runs(MIXED))] == expected
    assert set(step.samples) == {3, 8}
    alone = [driver.run([run])[0].tokens for run in runs(MIXED)]
    assert alone == expected


def test_rows_that_want_more_share_the_forward_pass(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, biases and logprobs are served apart, from the same logits; the steps after them are not."""
    more = [
        greedy(6, logprobs=3, prompt_logprobs=1),
        greedy(8, presence_penalty=1.5, frequency_penalty=0.5),
        SamplingParams(temperature=0.8, seed=3, logit_bias={7: 4.0}, max_tokens=7),
    ]
    driver = Driver(str(directory), num_blocks=64)
    expected = driver.run(runs(MIXED + more))
    step = static(driver, [8], monkeypatch)
    found = driver.run(runs(MIXED + more))
    assert [run.tokens for run in found] == [run.tokens for run in expected]
    for ours, theirs in zip(found[5].logprobs, expected[5].logprobs, strict=True):
        assert ours is not None
        assert theirs is not None
        assert (ours.token_ids, ours.ranks) == (theirs.token_ids, theirs.ranks)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    assert 0 < len(step.samples) < len(step.forwards)


def test_a_plain_step_counts_and_copies_what_it_needs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the whole step are counted for pipelines, and what drafts add is copied for drafts: of a step
    without either, one tensor goes to the host."""
    driver = Driver(str(directory), num_blocks=64)
    step = static(driver, [4], monkeypatch)
    copied: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor, pins: bool) -> torch.Tensor:
        copied.append(tensor)
        return tensor.clone()

    def no_count(message: SchedulerOutput) -> int:
        raise AssertionError("a plain step's tokens are counted")

    monkeypatch.setattr(pending_step, "_copy", copy)
    monkeypatch.setattr(SchedulerOutput, "num_tokens", property(no_count))
    done = driver.run(runs([greedy(5), greedy(5)]))
    assert all(len(run.tokens) == 5 for run in done)
    assert len(copied) == len(step.forwards) == 4


def test_more_rows_than_the_largest_size(
    directory: Path, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(str(directory), num_blocks=64)
    step = static(driver, [2], monkeypatch)
    done = driver.run(runs([greedy(4), greedy(8), greedy(6)]))
    assert [run.tokens for run in done] == [
        hf_greedy(reference, prompt, n) for prompt, n in zip(prompts(3), (4, 8, 6), strict=True)
    ]
    assert set(step.forwards) == {2}


def test_sizes() -> None:
    assert graph_sizes(EngineConfig(max_num_seqs=1)) == [1]
    assert graph_sizes(EngineConfig(max_num_seqs=20)) == [1, 2, 4, 8, 16, 20]
    sizes = graph_sizes(EngineConfig(max_num_seqs=256))
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[-1] == 256
    assert len(sizes) == 35
    assert len(graph_sizes(EngineConfig(max_num_seqs=4096, max_num_batched_tokens=4096))) < 80
    assert graph_sizes(EngineConfig(max_num_seqs=64, max_num_batched_tokens=10))[-1] == 10
    assert graph_sizes(EngineConfig(max_num_seqs=64, cuda_graph_sizes=(32, 8, 100))) == [8, 32, 64]


def test_where_there_can_be_none(directory: Path) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert refusal(EngineConfig(), cpu, is_capturable=True) == "no GPU"
    assert refusal(EngineConfig(cuda_graphs="off"), gpu, is_capturable=True) == "as configured"
    assert "attention_backend=torch" in (
        refusal(EngineConfig(attention_backend="torch"), gpu, is_capturable=False) or ""
    )
    assert refusal(EngineConfig(), gpu, is_capturable=True) is None
    with pytest.raises(ConfigError, match="cuda_graphs=on, but no GPU") as error:
        Driver(str(directory), cuda_graphs="on", num_blocks=8)
    assert error.value.param == "cuda_graphs"


def test_a_failed_capture_goes_on_without(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(str(directory), num_blocks=8)

    def broken(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    monkeypatch.setattr("app.worker.graphs.cuda_graphs.measure", broken)
    setup = set_up(driver)
    assert setup.reserve() == 0
    assert setup.capture() is None
    assert setup.note.startswith("CUDA graphs: off (capture failed: RuntimeError: operation not permitted")
    forced = set_up(driver, cuda_graphs="on")
    with pytest.raises(ConfigError, match="capture failed"):
        forced.reserve()


def test_a_rank_that_cannot_capture_says_so_instead_of_going_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks are in the midst of a step's sums: they end with this one, and cannot be asked any more."""
    driver = Driver(str(directory), num_blocks=8)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    monkeypatch.setattr("app.worker.graphs.cuda_graphs.measure", broken)
    group = RankGroup(0, 2, object())  # type: ignore[arg-type]
    setup = set_up(driver, group)
    with pytest.raises(ConfigError, match="capture failed: RuntimeError: out of memory; set cuda_graphs=off"):
        setup.reserve()


def test_shutdown_frees_a_worker_with_static_steps(directory: Path) -> None:
    """At once: the next engine of the process counts the free memory of the device before a collector runs."""
    driver = Driver(str(directory), num_blocks=8)
    runner = driver.worker._runner
    assert runner is not None
    decode_statically(driver.worker, [1, 2])
    gone = weakref.ref(runner)
    cache = weakref.ref(runner._forward.cache.tensors[0])
    del runner
    gc.collect()
    gc.disable()
    try:
        driver.worker.shutdown()
        assert gone() is None
        assert cache() is None
    finally:
        gc.enable()
