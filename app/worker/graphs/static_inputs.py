"""Puts what the host says of a step over static tensors, at fixed addresses, where a captured graph finds it.

That is the rows, how many tokens each of them brings, and the lines of the table (worker/rows/step_inputs.py); all else
is made on the device (app/kernels/rows). A step that finds what the one before left needs nothing of the host. For
another, the host fills a pinned buffer and one transfer, ordered by the stream, overwrites the device's: the step
before has read it by then (I2). Of pinned buffers there are several, each reused only once its transfer is over.

A step of N requests runs at a size G >= N. Rows N .. G - 1 pad it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from app.platforms import platform_of
from app.worker.rows.step_inputs import BufferLayout, Line, StepInputs

RING = 4  # more than step messages are in flight on a worker
ROWS = Line("rows", torch.int32, idle=-1)  # [G]
COUNTS = Line("counts", torch.int32, idle=1)  # [G] tokens that each brings


class _HostBuffer:
    """A buffer of the ring; on a GPU it is pinned and knows when its last transfer was over."""

    def __init__(self, layout: BufferLayout, device: torch.device) -> None:
        runtime = platform_of(device).runtime
        self.bytes = torch.zeros(layout.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=runtime is not None)
        self._values = {name: view.numpy() for name, view in layout.split(self.bytes).items()}
        self._sent: torch.Event | None = None if runtime is None else runtime.Event()

    def values(self) -> dict[str, NDArray[np.generic]]:
        """The lines, to be filled; waits for the transfer that still reads them."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._values

    def note_sent(self) -> None:
        """Note that the transfer is enqueued."""
        if self._sent is not None:
            self._sent.record()


class StaticInputs:
    """The static buffer of up to `max_size` rows and the way into it. Made once the table is complete."""

    def __init__(self, table: StepInputs, max_size: int, device: torch.device) -> None:
        self._table = table
        self._lines = [ROWS, COUNTS, *(entry.line for entry in table.lines.values())]
        layout = BufferLayout(self._lines, [max_size] * len(self._lines))
        self._bytes = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self._views = layout.split(self._bytes)
        self._ring = [_HostBuffer(layout, device) for _ in range(RING if platform_of(device).is_async else 1)]
        self._next = 0
        self._num_changes = -1
        # What the buffer holds.
        self._rows: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._counts: NDArray[np.int32] | None = None

    def view(self, size: int) -> dict[str, torch.Tensor]:
        """The device's lines of a step of `size` rows: the same memory every time."""
        return {name: values[:size] for name, values in self._views.items()}

    def load(self, rows: NDArray[np.int64], counts: NDArray[np.int32] | None = None) -> None:
        """Rows [N] with so many tokens each (None: one); all others are padding. Enqueues a transfer if that is
        news."""
        known = self._num_changes == self._table.num_changes
        if known and np.array_equal(self._rows, rows) and self._has(counts):
            return
        self._rows, self._num_changes = rows.copy(), self._table.num_changes
        self._counts = None if counts is None else counts.copy()
        buffer = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        values, count = buffer.values(), len(rows)
        for line in self._lines:
            values[line.name][count:] = line.idle
        values[ROWS.name][:count] = rows
        values[COUNTS.name][:count] = 1 if counts is None else counts
        for name, entry in self._table.lines.items():
            values[name][:count] = entry.values[rows]
        self._bytes.copy_(buffer.bytes, non_blocking=True)
        buffer.note_sent()

    def pad_all(self) -> None:
        """A step that nobody asked for: for warming up and capture."""
        self.load(np.empty(0, dtype=np.int64))

    def _has(self, counts: NDArray[np.int32] | None) -> bool:
        """True if these are the counts in the buffer."""
        if counts is None or self._counts is None:
            return counts is self._counts
        return np.array_equal(self._counts, counts)
