"""Inputs of a decode step (one token a row) at fixed addresses, where a captured graph finds them.

The host fills a pinned buffer and one transfer, ordered by the stream, overwrites the device's buffer: the step
before has read it by then (I2). Of pinned buffers there are several, each reused only once its transfer is over.

A step of N requests runs at a size G >= N. Rows N .. G - 1 pad it: they attend one position of some valid block,
write no keys or values (slot -1), and their token goes to two spare entries behind the rows' token ids.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.sampling.sampling_batch import HostParameters
from app.engine.worker.row_state import RowState

ArrayT = TypeVar("ArrayT")

RING = 4  # more than step messages are in flight on a worker
WORDS = 10  # int64 words of a row


def stride_of(size: int) -> int:
    """Rows that a field has room for: each field starts at a multiple of 16 bytes, and so do the halves of those that
    share words, because Triton compiles a kernel anew for pointers that do not."""
    return -(-size // 4) * 4


@dataclass(slots=True, frozen=True)
class Fields(Generic[ArrayT]):
    """A buffer's fields for a size: views of the same layout on the device and, as arrays, on the host."""

    positions: ArrayT  # int64 [G] of the input token
    lengths: ArrayT  # int64 [G] tokens known = absolute position of the token to be sampled
    slots: ArrayT  # int64 [G]
    sources: ArrayT  # int64 [G] flat index of the input token in RowState.flat_token_ids
    targets: ArrayT  # int64 [G] of the sampled token
    keys: ArrayT  # int64 [G, 2] seed, choice index
    seq_lens: ArrayT  # int32 [G]
    rows: ArrayT  # int32 [G]
    temperature: ArrayT  # fp32 [G], 0: greedy
    top_p: ArrayT  # fp32 [G], 1: off
    min_p: ArrayT  # fp32 [G], 0: off
    top_k: ArrayT  # int32 [G], 0: off


def device_fields(words: torch.Tensor, size: int) -> Fields[torch.Tensor]:
    """Views into int64 [WORDS * stride]: the one place that says where each field lies."""
    stride = stride_of(size)
    w, keys = words.view(WORDS, stride)[:5, :size], words[5 * stride : 5 * stride + 2 * size].view(size, 2)
    ints, floats = words[7 * stride : 9 * stride].view(torch.int32), words[8 * stride :].view(torch.float32)
    return Fields(
        w[0], w[1], w[2], w[3], w[4], keys, ints[:size], ints[stride : stride + size], floats[:size],
        floats[stride : stride + size], floats[2 * stride : 2 * stride + size],
        words[9 * stride :].view(torch.int32)[stride : stride + size],
    )  # fmt: skip


def host_fields(words: torch.Tensor, size: int) -> Fields[NDArray[Any]]:
    """The same for a buffer on the host."""
    views = device_fields(words, size)
    return Fields(*(getattr(views, field.name).numpy() for field in dataclasses.fields(views)))


class _HostBuffer:
    """A buffer of the ring; on a GPU it is pinned and knows when its last transfer was over."""

    def __init__(self, max_size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.words = torch.zeros(WORDS * stride_of(max_size), dtype=torch.int64, pin_memory=on_gpu)
        self._fields: dict[int, Fields[NDArray[Any]]] = {}
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def fields(self, size: int) -> Fields[NDArray[Any]]:
        """The fields, to be filled; waits for the transfer that still reads them."""
        if self._sent is not None:
            self._sent.synchronize()
        if size not in self._fields:
            self._fields[size] = host_fields(self.words[: WORDS * stride_of(size)], size)
        return self._fields[size]

    def sent(self) -> None:
        """Note that the transfer is enqueued."""
        if self._sent is not None:
            self._sent.record()


class DecodeInputs:
    """The static buffer of up to `max_size` rows and the way into it."""

    def __init__(self, max_size: int, state: RowState) -> None:
        self._state = state
        self._words = torch.zeros(WORDS * stride_of(max_size), dtype=torch.int64, device=state.device)
        self._ring = [_HostBuffer(max_size, state.device) for _ in range(RING if state.device.type == "cuda" else 1)]
        self._next = 0
        self._views: dict[int, Fields[torch.Tensor]] = {}

    def view(self, size: int) -> Fields[torch.Tensor]:
        """The device's fields of a step of `size` rows: the same memory every time."""
        if size not in self._views:
            self._views[size] = device_fields(self._words[: WORDS * stride_of(size)], size)
        return self._views[size]

    def load(self, rows: NDArray[np.int64], parameters: HostParameters | None, size: int) -> None:
        """One token for each of `rows` [N], padded to `size`; enqueues the transfer."""
        buffer = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        fields = buffer.fields(size)
        self._fill_rows(fields, rows)
        if parameters is not None:
            _fill_parameters(fields, parameters, len(rows))
        if len(rows) < size:
            self._pad(fields, len(rows))
        self._words[: WORDS * stride_of(size)].copy_(buffer.words[: WORDS * stride_of(size)], non_blocking=True)
        buffer.sent()

    def pad_all(self, size: int) -> None:
        """A step of `size` rows that nobody asked for: for warming up and capture."""
        self.load(np.zeros(0, dtype=np.int64), HostParameters.none(), size)

    def _fill_rows(self, fields: Fields[NDArray[Any]], rows: NDArray[np.int64]) -> None:
        state, n = self._state, len(rows)
        positions = state.num_computed_tokens[rows]
        blocks, offsets = np.divmod(positions, state.block_size)
        fields.positions[:n] = positions
        fields.lengths[:n] = positions + 1
        fields.slots[:n] = state.host_block_table[rows, blocks] * np.int64(state.block_size) + offsets
        fields.sources[:n] = sources = rows * state.token_ids.shape[1] + positions
        fields.targets[:n] = sources + 1
        fields.seq_lens[:n] = positions + 1
        fields.rows[:n] = rows

    def _pad(self, fields: Fields[NDArray[Any]], n: int) -> None:
        fields.positions[n:] = fields.rows[n:] = fields.keys[n:] = 0
        fields.lengths[n:] = fields.seq_lens[n:] = 1
        fields.slots[n:] = -1
        fields.sources[n:] = self._state.spare
        fields.targets[n:] = self._state.spare + 1
        fields.temperature[n:] = fields.min_p[n:] = fields.top_k[n:] = 0
        fields.top_p[n:] = 1.0


def _fill_parameters(fields: Fields[NDArray[Any]], parameters: HostParameters, n: int) -> None:
    fields.keys[:n] = parameters.keys
    fields.temperature[:n] = parameters.temperature
    fields.top_p[:n] = parameters.top_p
    fields.min_p[:n] = parameters.min_p
    fields.top_k[:n] = parameters.top_k
