"""The book-keeping of captured steps, with a CUDA that remembers calls and repeats them at a replay.

What a capture really does to kernels only a GPU shows: tests/worker/test_engine_on_gpu.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.distributed.parallel_groups import RankGroup
from app.worker.graphs import cuda_graphs
from app.worker.graphs.cuda_graphs import CudaGraphs
from app.worker.graphs.graph_setup import GraphSetup, at_start
from app.worker.graphs.static_step import CASCADE, LONG, MOST_EMPTY, StaticStep, StepKey
from app.worker.rows.worker_feature import NO_PARTS
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

CPU = torch.device("cpu")
Call = tuple[str, int]


class FakeCuda:
    """Streams that do nothing, graphs that repeat a step's calls, memory that shrinks by what was captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self.captured: list[Call] = []
        self.replayed: list[Call] = []
        self.free = 1 << 33
        self.taken_by_others = 0  # whenever somebody asks what is free
        self.pool = object()
        self.steps: list[StaticStep] = []
        fake = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                self.first, self.pool = len(fake.calls), pool

            def capture_end(self) -> None:
                self.recorded = fake.calls[self.first :]
                fake.captured += self.recorded
                fake.free -= 3 << 20

            def replay(self) -> None:
                for name, size in self.recorded:
                    repeated, *parts = name.split()
                    getattr(StaticStep, repeated)(fake.steps[-1], StepKey(size, frozenset(parts)))
                    fake.replayed.append((name, size))

            def reset(self) -> None:
                fake.free += 3 << 20

        class Stream:
            def __init__(self, *_: object) -> None: ...

            def wait_stream(self, other: object) -> None:
                assert isinstance(other, Stream)

        for name, value in {
            "CUDAGraph": Graph, "Stream": Stream, "graph_pool_handle": lambda: self.pool, "current_stream": Stream,
            "stream": lambda _: nullcontext(), "synchronize": lambda *_: None, "empty_cache": lambda: None,
            "mem_get_info": self.mem_get_info, "memory_snapshot": self.memory_snapshot,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def mem_get_info(self, _: object) -> tuple[int, int]:
        self.free -= self.taken_by_others
        return self.free, 1 << 34

    def memory_snapshot(self) -> list[dict[str, Any]]:
        sizes = (("pool", 20 << 20), ("pool", 2 << 20), ("of others", 64 << 20))
        return [{"segment_pool_id": self.pool if whose == "pool" else (0, 0), "total_size": n} for whose, n in sizes]

    def watch(self, step: StaticStep) -> None:
        """Note the calls of this step."""
        self.steps.append(step)
        for name in ("forward", "sample"):
            setattr(step, name, self._noted(step, name))

    def _noted(self, step: StaticStep, name: str) -> Any:
        def call(key: StepKey) -> None:
            self.calls.append((" ".join([name, *sorted(key.parts)]), key.size))
            getattr(StaticStep, name)(step, key)

        return call


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("llama")


@pytest.fixture
def driver(directory: Path) -> Driver:
    return Driver(str(directory), num_blocks=64)


def test_captured_largest_first_and_replayed(directory: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = driver.worker._runner
    assert runner is not None
    fake = FakeCuda(monkeypatch)
    with torch.inference_mode():
        step = StaticStep(runner._forward, runner._state, runner._features, [1, 2, 4])
        fake.watch(step)
        graphs = CudaGraphs(step, CPU)
        assert graphs.capture(step.keys) >= 0.0
    assert fake.captured == [(name, size) for size in (4, 2, 1) for name in ("forward", "sample")]
    runner._static = graphs
    judge = hf_model(directory)
    prompts = [[5 + i, 9, 200 + i] * (i + 1) for i in range(3)]
    done = driver.run([Run(prompt, greedy(4 + 2 * i)) for i, prompt in enumerate(prompts)])
    assert [run.tokens for run in done] == [hf_greedy(judge, p, 4 + 2 * i) for i, p in enumerate(prompts)]
    assert [size for name, size in fake.replayed if name == "forward"] == [4] * 3 + [2] * 2 + [1] * 2
    assert len(fake.replayed) == 2 * 7
    graphs.release()
    assert fake.free == 1 << 33


def test_steps_that_share_prefixes_have_graphs_of_their_own(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = driver.worker._runner
    assert runner is not None
    fake = FakeCuda(monkeypatch)
    with torch.inference_mode():
        step = StaticStep(runner._forward, runner._state, runner._features, [1, 2, 4], [2, 4])
        fake.watch(step)
        assert cuda_graphs.measure(partial(CudaGraphs, step, CPU), CPU) == (6 << 20) * 5
        graphs = CudaGraphs(step, CPU)
        fake.captured.clear()
        graphs.capture(step.keys)
        assert fake.captured == [
            ("forward", 4), ("sample", 4), ("forward", 2), ("sample", 2), ("forward", 1), ("sample", 1),
            ("forward cascade", 4), ("forward cascade", 2),
        ]  # fmt: skip
        shared = frozenset({CASCADE})
        found = [graphs.key_for(n, shared) for n in (1, 2, 3, 5)]
        assert found == [StepKey(2, shared), StepKey(2, shared), StepKey(4, shared), None]
        step.inputs.pad_all()
        graphs.forward(StepKey(4, shared))
        graphs.forward(StepKey(4))
    assert fake.replayed == [("forward cascade", 4), ("forward", 4)]
    graphs.release()
    assert fake.free == 1 << 33


def test_a_long_row_has_a_graph_of_its_own(directory: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is captured at a start; until it is, and where rows are several, the others serve."""
    runner = driver.worker._runner
    assert runner is not None
    fake = FakeCuda(monkeypatch)
    monkeypatch.setattr(type(runner._forward.model), "longest_at_once", lambda self, rows: 8 if rows == 1 else 0)
    long = StepKey(1, frozenset({LONG}))
    with torch.inference_mode():
        step = StaticStep(runner._forward, runner._state, runner._features, [1, 2])
        fake.watch(step)
        assert long in at_start(step, 3)
        graphs = CudaGraphs(step, CPU)
        graphs.capture([key for key in step.keys if key != long])
        runner._static = graphs
        judge, prompt = hf_model(directory), [5, 9, 200, 31, 7, 8]
        expected = hf_greedy(judge, prompt, 6)
        assert driver.run([Run(prompt, greedy(6))])[0].tokens == expected
        assert [call for call in fake.replayed if call[0] != "sample"] == [("forward", 1)] * 5
        graphs.capture(graphs.missing)
        assert fake.captured[-1] == ("forward long", 1)
    fake.replayed.clear()
    assert driver.run([Run(prompt, greedy(6))])[0].tokens == expected
    assert [call for call in fake.replayed if call[0] != "sample"] == [("forward", 1)] * 2 + [("forward long", 1)] * 3
    fake.replayed.clear()
    assert [run.tokens for run in driver.run([Run(prompt, greedy(6)), Run(prompt, greedy(6))])] == [expected] * 2
    assert [call for call in fake.replayed if call[0] != "sample"] == [("forward", 2)] * 5
    # Longer than a row can be.
    monkeypatch.setattr(type(runner._forward.model), "longest_at_once", lambda self, rows: 1 << 20)
    with torch.inference_mode():
        assert long not in StaticStep(runner._forward, runner._state, runner._features, [1, 2]).keys


def test_rows_of_which_one_is_long_have_a_graph_of_their_own(
    directory: Path, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as one of them is; where a lone one never is."""
    runner = driver.worker._runner
    assert runner is not None
    fake = FakeCuda(monkeypatch)
    monkeypatch.setattr(type(runner._forward.model), "longest_at_once", lambda self, rows: 8 if rows == 2 else 0)
    prompts = [5, 9, 200, 31, 7, 8], [5, 9, 200]
    with torch.inference_mode():
        step = StaticStep(runner._forward, runner._state, runner._features, [1, 2])
        fake.watch(step)
        graphs = CudaGraphs(step, CPU)
        graphs.capture(step.keys)
        runner._static = graphs
        expected = [hf_greedy(hf_model(directory), prompt, 6) for prompt in prompts]
    assert StepKey(2, frozenset({LONG})) in step.keys
    assert StepKey(1, frozenset({LONG})) not in step.keys
    fake.replayed.clear()
    assert [run.tokens for run in driver.run([Run(prompt, greedy(6)) for prompt in prompts])] == expected
    assert [call for call in fake.replayed if call[0] != "sample"] == [("forward", 2)] * 2 + [("forward long", 2)] * 3


def test_measured_by_a_trial_that_leaves_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = driver.worker._runner
    assert runner is not None
    fake = FakeCuda(monkeypatch)
    with torch.inference_mode():
        step = StaticStep(runner._forward, runner._state, runner._features, [1, 2, 4, 8])
        fake.watch(step)
        assert cuda_graphs.measure(partial(CudaGraphs, step, CPU), CPU) == (6 << 20) * 4
    assert fake.free == 1 << 33


def test_a_neighbour_takes_memory_meanwhile(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken from what is left, but not once for each size, nor is it told to be the graphs'."""
    runner = driver.worker._runner
    assert runner is not None
    fake = FakeCuda(monkeypatch)
    fake.taken_by_others = 1 << 30
    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    with torch.inference_mode():
        step = StaticStep(runner._forward, runner._state, runner._features, [1, 2, 4, 8])
        assert cuda_graphs.measure(partial(CudaGraphs, step, CPU), CPU) <= (1 << 30) + 4 * cuda_graphs.MOST_OF_DRIVER
        parts = (runner._forward, runner._state, RankGroup(), runner._features)
        setup = GraphSetup(EngineConfig(max_num_seqs=16), *parts, shares_prefixes=False)
        assert isinstance(setup.capture(), CudaGraphs)
    assert " 22 MiB of temporary memory" in setup.note


def test_set_up_and_described(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = driver.worker._runner
    assert runner is not None
    FakeCuda(monkeypatch)
    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    with torch.inference_mode():
        parts = (runner._forward, runner._state, RankGroup(), runner._features)
        setup = GraphSetup(EngineConfig(max_num_seqs=16), *parts, shares_prefixes=False)
        assert setup.reserve() > 0
        assert isinstance(setup.capture(), CudaGraphs)
    assert setup.note.startswith("CUDA graphs: 5 for 5 batch sizes up to 16, 22 MiB of temporary memory, captured in ")


def test_what_a_start_leaves_out_is_captured_in_idle_time(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a larger graph serves, and beyond the largest none; never more memory than was kept."""
    runner = driver.worker._runner
    assert runner is not None
    FakeCuda(monkeypatch)
    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    monkeypatch.setattr("app.worker.graphs.graph_setup.MOST_AT_START", 2)
    with torch.inference_mode():
        parts = (runner._forward, runner._state, RankGroup(), runner._features)
        setup = GraphSetup(EngineConfig(max_num_seqs=16), *parts, shares_prefixes=False)
        setup.reserve()
        graphs = setup.capture()
        assert isinstance(graphs, CudaGraphs)
        assert setup.note.endswith("; 3 more while the engine idles")
        assert [graphs.key_for(n, NO_PARTS) for n in (1, 9, 17)] == [StepKey(8), StepKey(16), None]
        assert graphs.key_for(1, frozenset({CASCADE})) is None
        assert [setup.capture_next() for _ in range(4)] == [2, 1, 0, 0]
        assert [graphs.key_for(n, NO_PARTS) for n in (1, 3)] == [StepKey(1), StepKey(4)]
        graphs.release()
        setup.capture()
        monkeypatch.setattr(CudaGraphs, "pool_bytes", lambda _: 1 << 30)
        assert setup.num_missing == 3
        assert setup.capture_next() == 0, "the memory that was kept is used up"


def test_a_capture_that_fails_leaves_nothing_to_idle_time(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = driver.worker._runner
    assert runner is not None
    FakeCuda(monkeypatch)
    captured = CudaGraphs._capture

    def without_memory(graphs: CudaGraphs, key: StepKey) -> None:
        if key.size == 4:
            raise RuntimeError("out of memory")
        captured(graphs, key)

    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    with torch.inference_mode():
        parts = (runner._forward, runner._state, RankGroup(), runner._features)
        setup = GraphSetup(EngineConfig(max_num_seqs=16), *parts, shares_prefixes=False)
        monkeypatch.setattr(CudaGraphs, "_capture", without_memory)
        assert setup.capture() is None
    assert setup.note.startswith("CUDA graphs: off (capture failed: RuntimeError: out of memory")
    assert (setup.num_missing, setup.capture_next()) == (0, 0)


def test_of_many_sizes_a_start_captures_those_that_pad_least(driver: Driver) -> None:
    runner = driver.worker._runner
    assert runner is not None
    with torch.inference_mode():
        step = StaticStep(runner._forward, runner._state, runner._features, list(range(1, 65)))
    sizes = [key.size for key in at_start(step, 12)]
    assert sizes == sorted(sizes, reverse=True)
    assert {1, 2, 4, 8, 16, 32, 64} < set(sizes)
    assert len(sizes) == 12
    sizes = [key.size for key in at_start(step, 100)]
    assert sizes == [64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]
    assert all(min(size for size in sizes if size >= rows) <= 1.5 * rows for rows in range(1, 65))


def test_of_steps_with_many_drafts_a_start_captures_all_that_would_run_without_a_graph(driver: Driver) -> None:
    """The next larger one of a start's would leave more places empty than a step may."""
    runner = driver.worker._runner
    assert runner is not None
    parts = (runner._forward, runner._state, runner._features)
    with torch.inference_mode():
        step = StaticStep(*parts, list(range(1, 65)), draft_counts=[3, 40])
    sizes = {count: [key.size for key in at_start(step, 200) if key.drafts == count] for count in (0, 3, 40)}
    assert sizes[0] == sizes[3] == [64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1]
    assert sizes[40] == [*range(64, 31, -1), 24, 16, 12, 8, 6, 4, 3, 2, 1]
    assert all((min(size for size in sizes[40] if size >= rows) - rows) * 41 <= MOST_EMPTY for rows in range(1, 65))
