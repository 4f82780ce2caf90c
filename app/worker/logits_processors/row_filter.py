"""Filters that one number of each row steers: their work is the device's alone, so captured steps have it, too.

A step whose rows use a filter has the filter's part; in ordinary steps, and beside other processors, it is one of
these. Both ways call the same function of each row alone.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from app.records.step import NewRequest
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep
from app.worker.rows.step_inputs import StepInput, StepInputs, StepView


class RowFilter(LogitsProcessor):
    """Base of the filters. `part` is its name, of the line of the step's inputs, too."""

    off: ClassVar[float] = 0.0  # the number that leaves a row as it is
    _line: StepInput

    def declare(self, inputs: StepInputs) -> None:
        """The line of its numbers."""
        self._line = inputs.declare(self.part, torch.float32, idle=self.off, for_layers=False)

    @abstractmethod
    def number(self, request: NewRequest) -> float:
        """Returns the number of a request's row."""

    @abstractmethod
    def filter(self, logits: torch.Tensor, numbers: torch.Tensor, temperatures: torch.Tensor) -> None:
        """-inf in place of what is dropped of fp32 logits [N, V]: by the rows' numbers fp32 [N, 1], and temperatures
        [N, 1], above 0, by which the logits are not divided yet. Without a look at a value on the host."""

    def read(self, request: NewRequest) -> tuple[float, float] | None:
        """See LogitsProcessor."""
        number = self.number(request)
        return None if number == self.off else (number, request.spec.sampling.temperature)

    def take(self, row: int, request: NewRequest) -> bool:
        """See LogitsProcessor."""
        taken = super().take(row, request)
        self._line.set(row, self._by_row[row][0] if taken else self.off)
        return taken

    def drop(self, row: int) -> None:
        """See LogitsProcessor."""
        super().drop(row)
        self._line.set(row, self.off)

    def takes_part(self, rows: NDArray[np.int64]) -> bool:
        """See WorkerFeature."""
        return self.serves(rows)

    def build(self, indices: list[int], states: list[tuple[float, float]]) -> None:
        """See LogitsProcessor."""
        self._indices = self.long(indices)
        numbers, temperatures = zip(*states, strict=True)
        self._numbers, self._temperatures = (self.floats(list(values))[:, None] for values in (numbers, temperatures))

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """See LogitsProcessor."""
        chosen = logits[self._indices]
        self.filter(chosen, self._numbers, _above_0(self._temperatures))
        logits[self._indices] = chosen

    def logits(self, view: StepView, logits: torch.Tensor) -> None:
        """See WorkerFeature."""
        temperatures = view.of_tokens("temperature")[:, None]
        self.filter(logits, view.of_tokens(self.part)[:, None], _above_0(temperatures))


def _above_0(temperatures: torch.Tensor) -> torch.Tensor:
    """Greedy rows have none; any will do."""
    return torch.where(temperatures > 0, temperatures, 1.0)
