"""A filter from outside of the tree: one file and one line of a table, in ordinary steps and in captured ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.records.request import EngineRequest
from app.records.step import NewRequest
from app.worker.graphs.cuda_graphs import CudaGraphs
from app.worker.graphs.static_step import StaticStep, StepKey
from app.worker.logits_processors import LOGITS_PROCESSORS
from app.worker.logits_processors.base import SamplingStep
from app.worker.rows.step_inputs import StepInputs, StepView
from app.worker.warmup.dummy_step import launch_static
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, Run, decode_statically, greedy

FILE = """
import torch
from app.worker.logits_processors.row_filter import RowFilter

class Variant(RowFilter):
    part = "top_a"

    def number(self, request):
        return 0.4 * request.spec.choice_index

    def filter(self, logits, numbers, temperatures):
        probs = (logits / temperatures).softmax(dim=-1)
        least = numbers * probs.amax(dim=-1, keepdim=True) ** 2
        logits.masked_fill_(probs < least, float("-inf"))
"""
PARTS = frozenset({"top_a"})


@pytest.fixture
def variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "top_a_filter.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "top_a_filter", raising=False)
    monkeypatch.setitem(LOGITS_PROCESSORS._table, "top_a", "top_a_filter:Variant")
    return importlib.import_module("top_a_filter").Variant


def _request(row: int, number: int, temperature: float) -> NewRequest:
    spec = EngineRequest("r", [], greedy(4, temperature=temperature), number)
    return NewRequest(row, np.array([1], np.int32), 1, 0, [], spec, ())


def test_both_ways_drop_the_same(variant: Any) -> None:
    """Judged by NumPy; rows without the filter keep their logits, bit for bit."""
    inputs = StepInputs(4)
    temperature = inputs.declare("temperature", torch.float32)
    processor = variant(50, torch.device("cpu"))
    processor.declare(inputs)
    rows = np.array([2, 0, 3])
    for row, number, degree in ((2, 1, 0.7), (0, 0, 1.0), (3, 2, 0.0)):
        assert processor.take(row, _request(row, number, degree)) == (number > 0)
        temperature.set(row, degree)
    original = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 3
    expected = original.numpy().astype(np.float64)
    for i, (number, degree) in enumerate(((0.4, 0.7), (0.0, 1.0), (0.8, 1.0))):
        probs = np.exp(expected[i] / degree)
        probs /= probs.sum()
        expected[i][probs < number * probs.max() ** 2] = -np.inf
    apart, captured = original.clone(), original.clone()
    processor.select(rows)
    processor.apply(apart, SamplingStep(torch.tensor(rows), rows, torch.tensor(rows), torch.zeros(4, 4).int()))
    of_rows = {name: torch.from_numpy(entry.values[rows]) for name, entry in inputs.lines.items()}
    positions = type("Tensors", (), {"positions": torch.zeros(3)})()
    processor.logits(StepView(positions, torch.arange(4), of_rows), captured)
    assert apart.tolist() == captured.tolist() == expected.astype(np.float32).tolist()
    assert processor.takes_part(rows)
    processor.drop(2)
    processor.drop(3)
    assert not processor.takes_part(rows)
    assert inputs.lines["top_a"].values.tolist() == [0, 0, 0, 0]


def _runs(*numbers: int) -> list[Run]:
    prompts = [[5, 9, 200, 7, 3], [44, 8, 100], [17] * 12]
    options: list[dict[str, Any]] = [{"temperature": 4.0}, {"temperature": 5.0}, {"logprobs": 1, "temperature": 5.0}]
    return [
        Run(prompts[i], greedy(7, seed=i + 3, **options[i]), choice_index=number) for i, number in enumerate(numbers)
    ]


def test_a_captured_draw_has_the_filter_where_its_rows_do(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert variant.part == "top_a"
    driver = Driver(str(tiny_model("llama")), num_blocks=32)
    together, off = ([run.tokens for run in driver.run(_runs(*numbers))] for numbers in ((0, 1, 2), (0, 0, 0)))
    assert [a == b for a, b in zip(together, off, strict=True)] == [True, False, False]
    step = decode_statically(driver.worker, [1, 4])
    drawn: set[StepKey] = set()
    sample = step.sample
    monkeypatch.setattr(step, "sample", lambda key: (drawn.add(key), sample(key)))
    assert [run.tokens for run in driver.run(_runs(0, 1))] == together[:2]
    assert [run.tokens for run in driver.run(_runs(0))] == together[:1]
    assert drawn == {StepKey(4, PARTS), StepKey(1)}
    drawn.clear()
    assert [run.tokens for run in driver.run(_runs(0, 1, 2))] == together  # logprobs: drawn apart
    assert not drawn


def test_graphs_up_to_the_logits_serve_steps_with_the_filter_and_without(variant: Any) -> None:
    assert variant.part == "top_a"
    driver = Driver(str(tiny_model("llama")), num_blocks=8)
    step = decode_statically(driver.worker, [1, 4])
    assert step.keys == [StepKey(4), StepKey(1), StepKey(4, PARTS), StepKey(1, PARTS)]
    captured: list[tuple[str, StepKey]] = []
    graphs = object.__new__(CudaGraphs)
    graphs.step, graphs._forward, graphs._sample, graphs._sizes = step, {}, {}, {}
    graphs.recorder = SimpleNamespace(record=lambda run: captured.append((run.func.__name__, *run.args)))  # type: ignore
    with torch.inference_mode():
        for key in step.keys:
            graphs._capture(key)
    assert captured == [
        ("forward", StepKey(4)), ("sample", StepKey(4)), ("forward", StepKey(1)), ("sample", StepKey(1)),
        ("sample", StepKey(4, PARTS)), ("sample", StepKey(1, PARTS)),
    ]  # fmt: skip
    assert (graphs.missing, graphs.num_captured) == ([], 4)
    assert isinstance(step, StaticStep)


MANY = """
from top_a_filter import Variant

def part_of(number):
    def chosen(self, request):
        return 0.9 * (request.spec.choice_index >> number & 1)

    return type(f"Variant{number}", (Variant,), {"part": f"filter_{number}", "number": chosen})

V0, V1, V2, V3 = map(part_of, range(4))
"""


def test_of_many_parts_steps_have_none_each_alone_or_all(
    variant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose rows use two of four runs with all: the same tokens. Forward passes are launched once for all."""
    assert variant.part == "top_a"
    monkeypatch.delitem(LOGITS_PROCESSORS._table, "top_a")
    (tmp_path / "many_filters.py").write_text(MANY)
    monkeypatch.delitem(sys.modules, "many_filters", raising=False)
    for number in range(4):
        monkeypatch.setitem(LOGITS_PROCESSORS._table, f"filter_{number}", f"many_filters:V{number}")
    driver = Driver(str(tiny_model("llama")), num_blocks=32)
    ordinary = [[run.tokens for run in driver.run(_runs(*numbers))] for numbers in ((2, 0), (5, 2))]
    step = decode_statically(driver.worker, [1, 2])
    names = [f"filter_{number}" for number in range(4)]
    kinds = [frozenset[str](), *(frozenset({name}) for name in names), frozenset(names)]
    assert step.keys == [StepKey(size, kind) for kind in kinds for size in (2, 1)]
    launched: list[StepKey] = []
    forward, sample = step.forward, step.sample
    monkeypatch.setattr(step, "forward", lambda key: (launched.append(key), forward(key)))
    with torch.inference_mode():
        launch_static(step)
    assert launched == [StepKey(1), StepKey(2)]
    drawn: set[StepKey] = set()
    monkeypatch.setattr(step, "sample", lambda key: (drawn.add(key), sample(key)))
    assert [[run.tokens for run in driver.run(_runs(*numbers))] for numbers in ((2, 0), (5, 2))] == ordinary
    assert drawn == {StepKey(2, frozenset({"filter_1"})), StepKey(2, frozenset(names))}
