"""The static buffer: each line at its place, the same memory for every size, and no transfer without news."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.worker.graphs.static_inputs import StaticInputs
from app.worker.rows.step_inputs import StepInputs

CPU = torch.device("cpu")
ROWS = 8


def table() -> StepInputs:
    """Lines of unlike types, shapes and fillings, with a value of each row's own."""
    inputs = StepInputs(ROWS)
    for name, dtype, shape, idle in (
        ("keys", torch.int64, (2,), 0), ("top_k", torch.int32, (), 0), ("top_p", torch.float32, (), 1),
        ("shift", torch.int16, (3,), -7),
    ):  # fmt: skip
        entry = inputs.declare(name, dtype, shape, idle)
        for row in range(ROWS):
            entry.set(row, row + np.arange(np.prod(shape, dtype=int)).reshape(shape))
    return inputs


def ones(count: int) -> np.ndarray:
    return np.ones(count, dtype=np.int32)


def test_lines_field_by_field() -> None:
    inputs = StaticInputs(table(), ROWS, CPU)
    inputs.load(np.arange(ROWS), ones(ROWS))
    inputs.load(np.array([5, 0, 2]), np.array([4, 1, 2], dtype=np.int32))
    view = inputs.view(4)
    assert view["rows"].tolist() == [5, 0, 2, -1]
    assert view["counts"].tolist() == [4, 1, 2, 1]
    assert view["keys"].tolist() == [[5, 6], [0, 1], [2, 3], [0, 0]]
    assert view["top_p"].tolist() == [5, 0, 2, 1]
    assert view["shift"].tolist() == [[5, 6, 7], [0, 1, 2], [2, 3, 4], [-7] * 3]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_lines_do_not_overlap_and_are_aligned(size: int) -> None:
    lines = table()
    inputs = StaticInputs(lines, 6, CPU)
    inputs.load(np.arange(size), ones(size))
    view = inputs.view(size)
    for name, entry in lines.lines.items():
        assert view[name].tolist() == entry.values[:size].tolist()
    base = view["rows"].data_ptr()
    assert all((values.data_ptr() - base) % 16 == 0 for values in view.values())
    assert all(values.is_contiguous() for values in view.values())


def test_every_size_reads_the_same_memory() -> None:
    """A captured graph reads the addresses of its capture: a later load must arrive there."""
    inputs = StaticInputs(table(), ROWS, CPU)
    inputs.load(np.array([1]), ones(1))
    kept = inputs.view(2)
    addresses = {name: values.data_ptr() for name, values in kept.items()}
    inputs.load(np.array([0, 1, 2, 3, 4]), ones(5))
    inputs.load(np.array([3, 4]), ones(2))
    assert kept["rows"].tolist() == [3, 4]
    assert {name: values.data_ptr() for name, values in inputs.view(2).items()} == addresses


def test_a_step_like_the_one_before_sends_nothing() -> None:
    """Of the host's work on a decode step that is all; a request that comes or goes changes rows or values."""
    lines = table()
    inputs, sent = StaticInputs(lines, ROWS, CPU), []
    inputs._ring[0].note_sent = lambda: sent.append(1)  # type: ignore[method-assign]
    rows = np.array([4, 1, 2])
    inputs.load(rows, ones(3))
    inputs.load(rows.copy(), ones(3))
    assert len(sent) == 1
    lines.lines["top_k"].set(1, 9)
    inputs.load(rows, ones(3))
    assert inputs.view(3)["top_k"].tolist() == [4, 9, 2]
    inputs.load(rows[::-1], ones(3))
    inputs.load(rows[::-1], 2 * ones(3))
    inputs.load(rows[::-1])
    inputs.load(rows[:0])
    assert len(sent) == 6
