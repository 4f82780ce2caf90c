"""The table of what rows bring to a step beside their tokens: one line each, declared by who needs it.

A line says its name, type, the shape of one row's value, and what stands in the rows that only pad a captured step.
It keeps the value of every row on the host, from when a request enters the row until the next one does. Steps over
static tensors (worker/graphs) and all others read the same lines: the first have all of them at fixed addresses, the
others send along those that layers read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from app.kernels.rows import StepTensors
from app.platforms.to_device import ON_HOST

ALIGNMENT = 16  # bytes: Triton compiles a kernel anew for pointers to less


@dataclass(frozen=True)
class Line:
    """Type and shape of one value, and what stands in for it where there is none."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()  # of one row's value
    idle: float = 0

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """The type on the host."""
        return torch.empty(0, dtype=self.dtype, device="cpu").numpy().dtype

    @cached_property
    def num_bytes(self) -> int:
        """Size of one value."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(slots=True, eq=False)
class StepInput:
    """A line of the table and the value of every row."""

    line: Line
    values: NDArray[Any]  # [max_num_seqs, *shape]
    _table: StepInputs

    def set(self, row: int, value: Any) -> None:
        """Sets what the row brings from now on."""
        self.values[row] = value
        self._table.num_changes += 1


class StepInputs:
    """The table of one runner. It is written while the runner is put together; its values change with the requests."""

    def __init__(self, max_num_seqs: int) -> None:
        self.num_changes = 0  # of values: a step of the same rows as the one before need not look at each of them
        self.lines: dict[str, StepInput] = {}
        self.for_layers: list[StepInput] = []  # those that every step carries
        self._max_num_seqs = max_num_seqs

    def declare(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...] = (), idle: float = 0, *, for_layers: bool = True
    ) -> StepInput:
        """A new line. `for_layers`: what the hook `inputs` of a feature reads (app/worker/rows/worker_feature.py)."""
        assert name not in self.lines, f"two step inputs are called {name}"
        line = Line(name, dtype, shape, idle)
        values = torch.full((self._max_num_seqs, *shape), idle, dtype=dtype, device="cpu").numpy()
        self.lines[name] = entry = StepInput(line, values, self)
        if for_layers:
            self.for_layers.append(entry)
        return entry


@dataclass(slots=True, frozen=True)
class HostRows:
    """Holds what the host knows of a step's R rows."""

    rows: NDArray[np.int64]  # [R]
    starts: NDArray[np.int64]  # [R + 1] where the tokens of each begin
    first_positions: NDArray[np.int64]  # [R] of each one's first token in the step: at most, and exactly in prompts


@dataclass(slots=True)
class StepView:
    """A step on the device as features see it."""

    tensors: StepTensors  # of its T tokens and R rows
    starts: torch.Tensor  # int32 [R + 1] where the tokens of each row begin
    rows: Mapping[str, torch.Tensor]  # what the lines of the table hold for the step's rows, [R, ...] each
    host: HostRows | None = None  # None: the step is over static tensors, where all rows decode
    layer_inputs: dict[str, torch.Tensor] = field(default_factory=dict)  # what layers find in `ForwardContext.inputs`
    _row_of_token: torch.Tensor | None = None

    @property
    def row_of_token(self) -> torch.Tensor:
        """int64 [T] which of the step's R rows each token belongs to."""
        if self._row_of_token is None:
            num_tokens, counts = len(self.tensors.positions), self.starts.diff()
            self._row_of_token = torch.repeat_interleave(counts.long(), output_size=num_tokens)
        return self._row_of_token

    def of_tokens(self, name: str) -> torch.Tensor:
        """Returns what the line holds for the row of each token, [T, ...]."""
        values = self.rows[name]
        one_each = len(self.tensors.positions) == len(values)
        return values if one_each else values.index_select(0, self.row_of_token)


class BufferLayout:
    """Says where each of the lines lies in one buffer of bytes, for up to `capacity` values each."""

    def __init__(self, lines: Sequence[Line], capacities: Sequence[int]) -> None:
        self._lines = lines
        self._capacities = capacities
        sizes = [line.num_bytes * count for line, count in zip(lines, capacities, strict=True)]
        self._firsts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()

    @property
    def num_bytes(self) -> int:
        """Size of the buffer."""
        return int(self._firsts[-1])

    def split(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each line's part [capacity, *shape] of a buffer, uint8 [num_bytes]: the same memory."""
        views = {}
        for line, first, count in zip(self._lines, self._firsts, self._capacities, strict=False):
            part = buffer[first : first + count * line.num_bytes].view(line.dtype)
            views[line.name] = part.view(count, *line.shape)
        return views


def send(lines: Sequence[Line], arrays: Sequence[NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays as tensors of their lines' types, by name; on a GPU in one transfer from pinned memory."""
    if device.type in ON_HOST:
        sent = {}
        for line, array in zip(lines, arrays, strict=True):
            sent[line.name] = torch.from_numpy(np.ascontiguousarray(array, line.numpy))
        return sent
    layout = BufferLayout(lines, [len(array) for array in arrays])
    joined = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True)
    for view, array in zip(layout.split(joined).values(), arrays, strict=True):
        view.numpy()[...] = array
    return layout.split(joined.to(device, non_blocking=True))
