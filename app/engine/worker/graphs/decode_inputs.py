"""What the host says of a decode step (one token a row) at fixed addresses, where a captured graph finds it.

That is the rows and their sampling parameters; all else is made on the device (app/kernels/rows). A step of the same
rows with the same parameters as the one before needs nothing of the host. For another, the host fills a pinned buffer
and one transfer, ordered by the stream, overwrites the device's: the step before has read it by then (I2). Of pinned
buffers there are several, each reused only once its transfer is over.

A step of N requests runs at a size G >= N. Rows N .. G - 1 pad it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.sampling.sampling_batch import HostParameters
from app.platforms import platform_of

ArrayT = TypeVar("ArrayT")

RING = 4  # more than step messages are in flight on a worker


@dataclass(slots=True, frozen=True)
class DecodeFields(Generic[ArrayT]):
    """What lies in the buffer, and where: views of it on the device or, as arrays, on the host."""

    keys: ArrayT = field(metadata={"dtype": torch.int64, "width": 2, "padding": 0})  # [G, 2] seed, choice index
    rows: ArrayT = field(metadata={"dtype": torch.int32, "padding": -1})  # [G]
    top_k: ArrayT = field(metadata={"dtype": torch.int32, "padding": 0})  # [G], 0: off
    temperature: ArrayT = field(metadata={"dtype": torch.float32, "padding": 0})  # [G], 0: greedy
    top_p: ArrayT = field(metadata={"dtype": torch.float32, "padding": 1})  # [G], 1: off
    min_p: ArrayT = field(metadata={"dtype": torch.float32, "padding": 0})  # [G], 0: off


FIELDS = dataclasses.fields(DecodeFields)
ROW_BYTES = sum(f.metadata["dtype"].itemsize * f.metadata.get("width", 1) for f in FIELDS)


def stride_of(max_size: int) -> int:
    """Rows that a field has room for: so each field starts at a multiple of 16 bytes, because Triton compiles a kernel
    anew for pointers that do not."""
    return -(-max_size // 4) * 4


def split(buffer: torch.Tensor, size: int) -> DecodeFields[torch.Tensor]:
    """The first `size` rows of each field in a buffer, uint8 [stride * ROW_BYTES]."""
    stride, first, views = len(buffer) // ROW_BYTES, 0, []
    for f in FIELDS:
        dtype, width = f.metadata["dtype"], f.metadata.get("width")
        end = first + stride * dtype.itemsize * (width or 1)
        values = buffer[first:end].view(dtype)
        views.append((values if width is None else values.view(stride, width))[:size])
        first = end
    return DecodeFields(*views)


class _HostBuffer:
    """A buffer of the ring; on a GPU it is pinned and knows when its last transfer was over."""

    def __init__(self, max_size: int, device: torch.device) -> None:
        runtime = platform_of(device).runtime
        self.bytes = torch.zeros(ROW_BYTES * stride_of(max_size), dtype=torch.uint8, pin_memory=runtime is not None)
        views = split(self.bytes, max_size)
        self._fields = DecodeFields(*(getattr(views, f.name).numpy() for f in FIELDS))
        self._sent: torch.Event | None = None if runtime is None else runtime.Event()

    def fields(self) -> DecodeFields[NDArray[Any]]:
        """The fields, to be filled; waits for the transfer that still reads them."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._fields

    def sent(self) -> None:
        """Note that the transfer is enqueued."""
        if self._sent is not None:
            self._sent.record()


class DecodeInputs:
    """The static buffer of up to `max_size` rows and the way into it."""

    def __init__(self, max_size: int, device: torch.device) -> None:
        self._bytes = torch.zeros(ROW_BYTES * stride_of(max_size), dtype=torch.uint8, device=device)
        self._ring = [_HostBuffer(max_size, device) for _ in range(RING if platform_of(device).is_async else 1)]
        self._next = 0
        self._views: dict[int, DecodeFields[torch.Tensor]] = {}
        self._rows: NDArray[np.int64] | None = None  # what the buffer holds
        self._parameters: HostParameters | None = None

    def view(self, size: int) -> DecodeFields[torch.Tensor]:
        """The device's fields of a step of `size` rows: the same memory every time."""
        if size not in self._views:
            self._views[size] = split(self._bytes, size)
        return self._views[size]

    def load(self, rows: NDArray[np.int64], parameters: HostParameters | None) -> None:
        """One token for each of `rows` [N]; all others are padding. Enqueues a transfer if that is news. `parameters`
        are not changed once they were given here."""
        if self._parameters is parameters and self._rows is not None and np.array_equal(self._rows, rows):
            return
        self._rows, self._parameters = rows.copy(), parameters
        buffer = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        _fill(buffer.fields(), rows, parameters)
        self._bytes.copy_(buffer.bytes, non_blocking=True)
        buffer.sent()

    def pad_all(self) -> None:
        """A step that nobody asked for: for warming up and capture."""
        self.load(np.zeros(0, dtype=np.int64), None)


def _fill(fields: DecodeFields[NDArray[Any]], rows: NDArray[np.int64], parameters: HostParameters | None) -> None:
    for f in FIELDS:
        values, given = getattr(fields, f.name), rows if f.name == "rows" else getattr(parameters, f.name, None)
        values[:] = f.metadata["padding"]
        if given is not None:
            values[: len(given)] = given
