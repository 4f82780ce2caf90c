"""Defines what a logits processor is: it remembers the rows that ask for it, and costs nothing while none of them
samples.

Everything it needs of a request's text it reads from the device's token history, never from the host, so that the
next step message can be written before the last token has come back (I2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from app.platforms.to_device import to_device
from app.records.sampling_params import SamplingParams
from app.records.step import NewRequest
from app.worker.rows.step_inputs import StepInputs
from app.worker.rows.worker_feature import WorkerFeature

PARAMS = SamplingParams.model_fields


@dataclass(slots=True, frozen=True)
class SamplingStep:
    """The N rows that sample in this step."""

    rows: torch.Tensor  # int64 [N], on the device
    lengths: NDArray[np.int64]  # [N] most tokens known so far; the least are `slack` fewer
    device_lengths: torch.Tensor  # int64 [N] tokens known = absolute position of the token to be sampled
    token_ids: torch.Tensor  # int32 [max_num_seqs, W], every row's tokens on the device
    slack: int = 0


class LogitsProcessor(WorkerFeature, ABC):
    """Base of the processors, each a feature of the rows that ask for it. `apply` runs only while `active`."""

    # What a request brings that the processor reads (see `brought_by`); None: it looks at every request.
    reads: ClassVar[frozenset[object] | None] = None

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.active = False  # whether one of the selected rows uses it
        self._by_row: dict[int, Any] = {}

    def declare(self, inputs: StepInputs) -> None:
        """Add the lines that it needs to the inputs of steps; before the first request."""

    def take(self, row: int, request: NewRequest) -> bool:
        """Note a request that entered its row; False: it does not use the processor."""
        self._by_row.pop(row, None)
        state = self.read(request)
        if state is None:
            return False
        self._by_row[row] = state
        return True

    def drop(self, row: int) -> None:
        """The row is another's, or nobody's."""
        self._by_row.pop(row, None)

    def serves(self, rows: NDArray[np.int64]) -> bool:
        """True if one of these rows uses it."""
        return bool(self._by_row) and not self._by_row.keys().isdisjoint(rows.tolist())

    def select(self, rows: NDArray[np.int64]) -> None:
        """From now on these rows sample, in this order. Called only when rows or their requests changed."""
        if not self._by_row:
            self.active = False
            return
        used = [(i, self._by_row[row]) for i, row in enumerate(rows.tolist()) if row in self._by_row]
        self.active = bool(used)
        if used:
            self.build([i for i, _ in used], [state for _, state in used])

    def in_vocabulary(self, token_id: int) -> bool:
        """Ids outside the vocabulary are never produced, so there is nothing to do about them."""
        return 0 <= token_id < self.vocab_size

    def long(self, values: list[int] | NDArray[np.int64]) -> torch.Tensor:
        """int64 tensor on the device."""
        return to_device(np.asarray(values, dtype=np.int64), self.device)

    def flat(self, indices: list[int], columns: Sequence[NDArray[Any]]) -> tuple[torch.Tensor, NDArray[Any]]:
        """Lists of several rows as one: the logits row of every entry, int64 [n] on the device, and the entries [n].

        A request's lists are arrays from `read` on: `build` runs whenever a neighbour comes or goes, and handles
        them without a loop over their entries.
        """
        rows = np.repeat(np.array(indices, np.int64), [len(column) for column in columns])
        return self.long(rows), np.concatenate(columns)

    def floats(self, values: list[float]) -> torch.Tensor:
        """fp32 tensor on the device."""
        return to_device(np.array(values, dtype=np.float32), self.device)

    @abstractmethod
    def read(self, request: NewRequest) -> Any | None:
        """Returns what the processor must know of the request; None when the request does not use it."""

    @abstractmethod
    def build(self, indices: list[int], states: list[Any]) -> None:
        """Prepare tensors for the users among the selected rows: `states[i]` is that of logits row `indices[i]`."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """Edit fp32 logits [N, V] in place."""


def brought_by(request: NewRequest, names: Collection[str]) -> set[object]:
    """Those of the sampling parameters `names` that a request sets otherwise than the default, the types of the records
    in its `asks`, and `has_grammar` where it has one."""
    brought: set[object] = {"has_grammar"} if request.has_grammar else set()
    for ask in request.spec.asks:
        brought.add(type(ask))
    params = request.spec.sampling.__dict__
    for name in names:
        if params[name] != PARAMS[name].default:
            brought.add(name)
    return brought
