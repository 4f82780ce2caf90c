"""The decode step over static tensors, run uncaptured on the CPU: the tokens of transformers and of ordinary steps."""

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

from app.config import EngineConfig
from app.engine.distributed.parallel_groups import RankGroup
from app.engine.sampling.sampling_batch import HostParameters
from app.engine.sampling_params import SamplingParams
from app.engine.worker.graphs.cuda_graphs import graph_sizes
from app.engine.worker.graphs.decode_inputs import DecodeInputs
from app.engine.worker.graphs.decode_step import DecodeStep
from app.engine.worker.graphs.graph_setup import GraphSetup, refusal
from app.errors import ConfigError
from tests.engine.worker_driver import Driver, Run, decode_statically, greedy
from tests.tiny_models import hf_greedy, hf_model, tiny_model


class Counted(DecodeStep):
    """Counts what ran."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.forwards: list[int] = []
        self.samples: list[int] = []

    def forward(self, size: int, *, cascade: bool = False) -> None:
        super().forward(size, cascade=cascade)
        self.forwards.append(size)

    def sample(self, size: int) -> None:
        super().sample(size)
        self.samples.append(size)


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


def parameters(size: int) -> HostParameters:
    rows, ones = np.arange(size), np.ones(size, dtype=np.float32)
    return HostParameters(ones * 2, ones * 3, ones * 4, rows + 5, np.stack((rows + 100, rows + 200), axis=1))


def test_inputs_field_by_field() -> None:
    inputs = DecodeInputs(8, torch.device("cpu"))
    given = HostParameters(
        np.array([0.5, 0.0, 2.0], dtype=np.float32), np.array([0.9, 1.0, 0.1], dtype=np.float32),
        np.array([0.0, 0.2, 0.3], dtype=np.float32), np.array([4, 0, 1]), np.array([[2**62, 1], [7, 0], [-5, 3]]),
    )  # fmt: skip
    inputs.load(np.arange(8), parameters(8))
    inputs.load(np.array([5, 0, 2]), given)
    f = inputs.view(4)
    assert f.rows.tolist() == [5, 0, 2, -1]
    assert f.keys.tolist() == [[2**62, 1], [7, 0], [-5, 3], [0, 0]]
    assert f.temperature.tolist() == [0.5, 0.0, 2.0, 0.0]
    assert f.top_p.tolist() == pytest.approx([0.9, 1.0, 0.1, 1.0])
    assert f.min_p.tolist() == pytest.approx([0.0, 0.2, 0.3, 0.0])
    assert f.top_k.tolist() == [4, 0, 1, 0]
    inputs.load(np.array([5, 0, 2]), None)
    assert f.rows.tolist() == [5, 0, 2, -1]
    assert f.temperature.tolist() == [0.0] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_fields_do_not_overlap_and_are_aligned(size: int) -> None:
    inputs = DecodeInputs(6, torch.device("cpu"))
    given = parameters(size)
    inputs.load(np.arange(size), given)
    f = inputs.view(size)
    assert f.rows.tolist() == list(range(size))
    for name in ("keys", "temperature", "top_p", "min_p", "top_k"):
        assert getattr(f, name).tolist() == getattr(given, name).tolist()
    base = f.keys.data_ptr()
    assert all((getattr(f, name).data_ptr() - base) % 16 == 0 for name in f.__slots__)
    assert all(getattr(f, name).is_contiguous() for name in f.__slots__)


def test_every_size_reads_the_same_memory() -> None:
    """A captured graph reads the addresses of its capture: a later load must arrive there."""
    inputs = DecodeInputs(8, torch.device("cpu"))
    inputs.load(np.array([1]), None)
    kept = inputs.view(2)
    addresses = [getattr(kept, name).data_ptr() for name in kept.__slots__]
    inputs.load(np.array([0, 1, 2, 3, 4]), None)
    inputs.load(np.array([3, 4]), None)
    assert kept.rows.tolist() == [3, 4]
    assert [getattr(inputs.view(2), name).data_ptr() for name in kept.__slots__] == addresses


def test_a_step_like_the_one_before_sends_nothing() -> None:
    """Of the host's work on a decode step that is all; a request that comes or goes changes rows or parameters."""
    inputs, first, other = DecodeInputs(8, torch.device("cpu")), parameters(3), parameters(3)
    rows, sent = np.array([4, 1, 2]), []
    inputs._ring[0].sent = lambda: sent.append(1)  # type: ignore[method-assign]
    steps = [
        (rows, first),
        (rows.copy(), first),
        (rows, other),
        (rows[::-1], other),
        (rows[::-1], None),
        (rows[:0], None),
    ]
    for numbers, given in steps:
        inputs.load(numbers, given)
    assert len(sent) == len(steps) - 1


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

    monkeypatch.setattr("app.engine.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    monkeypatch.setattr("app.engine.worker.graphs.cuda_graphs.measure", broken)
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

    monkeypatch.setattr("app.engine.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    monkeypatch.setattr("app.engine.worker.graphs.cuda_graphs.measure", broken)
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
