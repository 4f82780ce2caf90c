"""The book-keeping of captured steps, with a CUDA that remembers calls and repeats them at a replay.

What a capture really does to kernels only a GPU shows: tests/engine/test_engine_on_gpu.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config import EngineConfig
from app.engine.distributed.parallel_groups import RankGroup
from app.engine.worker.graphs import cuda_graphs
from app.engine.worker.graphs.cuda_graphs import CudaGraphs
from app.engine.worker.graphs.decode_step import DecodeStep
from app.engine.worker.graphs.graph_setup import GraphSetup
from tests.engine.worker_driver import Driver, Run, greedy
from tests.tiny_models import hf_greedy, hf_model, tiny_model

CPU = torch.device("cpu")
Call = tuple[str, int]


class FakeCuda:
    """Streams that do nothing, graphs that repeat a step's calls, memory that shrinks by what was captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self.captured: list[Call] = []
        self.replayed: list[Call] = []
        self.free = 1 << 33
        self.steps: list[DecodeStep] = []
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
                    repeated, _, how = name.partition(" ")
                    getattr(DecodeStep, repeated)(fake.steps[-1], size, **({how: True} if how else {}))
                    fake.replayed.append((name, size))

            def reset(self) -> None:
                fake.free += 3 << 20

        class Stream:
            def __init__(self, *_: object) -> None: ...

            def wait_stream(self, other: object) -> None:
                assert isinstance(other, Stream)

        for name, value in {
            "CUDAGraph": Graph, "Stream": Stream, "graph_pool_handle": object, "current_stream": Stream,
            "stream": lambda _: nullcontext(), "synchronize": lambda *_: None, "empty_cache": lambda: None,
            "mem_get_info": lambda _: (self.free, 1 << 34),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def watch(self, step: DecodeStep) -> None:
        """Note the calls of this step."""
        self.steps.append(step)
        for name in ("forward", "sample"):
            setattr(step, name, self._noted(step, name))

    def _noted(self, step: DecodeStep, name: str) -> Any:
        def call(size: int, **how: bool) -> None:
            self.calls.append((" ".join([name, *how]), size))
            getattr(DecodeStep, name)(step, size, **how)

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
        step = DecodeStep(runner._forward, runner._state, [1, 2, 4])
        fake.watch(step)
        graphs = CudaGraphs(step, CPU)
        assert graphs.capture(step.sizes) >= 0.0
    assert fake.captured == [(name, size) for size in (4, 2, 1) for name in ("forward", "sample")]
    runner._decode = graphs
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
        step = DecodeStep(runner._forward, runner._state, [1, 2, 4], [2, 4])
        fake.watch(step)
        assert cuda_graphs.measure(step, CPU) == (9 << 20) + (6 << 20) * 3
        graphs = CudaGraphs(step, CPU)
        fake.captured.clear()
        graphs.capture(step.sizes)
        assert fake.captured == [
            ("forward", 4), ("forward cascade", 4), ("sample", 4), ("forward", 2), ("forward cascade", 2),
            ("sample", 2), ("forward", 1), ("sample", 1),
        ]  # fmt: skip
        assert [graphs.size_for(n, cascade=True) for n in (1, 2, 3, 5)] == [2, 2, 4, None]
        step.inputs.pad_all()
        graphs.forward(4, cascade=True)
        graphs.forward(4)
    assert fake.replayed == [("forward cascade", 4), ("forward", 4)]
    graphs.release()
    assert fake.free == 1 << 33


def test_measured_by_a_trial_that_leaves_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = driver.worker._runner
    assert runner is not None
    fake = FakeCuda(monkeypatch)
    with torch.inference_mode():
        step = DecodeStep(runner._forward, runner._state, [1, 2, 4, 8])
        fake.watch(step)
        assert cuda_graphs.measure(step, CPU) == (6 << 20) * 4
    assert fake.free == 1 << 33


def test_set_up_and_described(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = driver.worker._runner
    assert runner is not None
    FakeCuda(monkeypatch)
    monkeypatch.setattr("app.engine.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    with torch.inference_mode():
        parts = (runner._forward, runner._state, RankGroup(), runner._features)
        setup = GraphSetup(EngineConfig(max_num_seqs=16), *parts, shares_prefixes=False)
        assert setup.reserve() > 0
        assert isinstance(setup.capture(), CudaGraphs)
    assert setup.note.startswith("CUDA graphs: 5 batch sizes up to 16, 30 MiB, captured in ")
