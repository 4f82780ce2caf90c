"""Tells whether a step's decodes share enough of their prefixes to read these once
(app/kernels/attention/triton_cascade.py).

Finding the groups and one more launch a layer cost a few microseconds, which an ordinary step does not pay: the host
decides for each step, from its copy of the block tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.layers.attention_layer import AttentionLayer
from app.worker.rows.row_state import RowState

# Bytes that one layer must save. The extra launch and its share of the search take 4 us, in which an H200 reads 17 MB;
# and what many requests read is partly in its L2 cache anyway.
MIN_SAVED_BYTES = 40 << 20
FIRST_PROBE = 256  # positions: kernels share nothing shorter
MOST_ANSWERS = 8
EXACT_DTYPES = (torch.float32,)  # a request gives the same tokens alone or in a batch (I6): not for `auto`


class CascadeChoice:
    """Decides for one step after another; repeats its answer while the rows are the same."""

    def __init__(self, state: RowState, min_saved_positions: int | None) -> None:
        """`min_saved_positions`: how many positions fewer a step must read; None: share whatever there is."""
        self._state = state
        self._least = min_saved_positions
        longest = state.host_block_table.shape[1] * state.block_size
        count = max(0, (longest - 1) // FIRST_PROBE).bit_length()
        self._ends = FIRST_PROBE << np.arange(count)
        self._columns = (self._ends - 1) // state.block_size
        self._spans = np.diff(self._ends, prepend=0)
        # Rows -> answer, while no request enters. A few: running requests may be dealt over several step messages.
        self._answers: dict[bytes, bool] = {}
        self._entered = -1  # requests that had, then

    @property
    def note(self) -> str:
        """A line for the start-up notes."""
        if self._least is None:
            return "shared prefixes: read once for all decodes"
        return f"shared prefixes: read once where a step's decodes save {self._least} positions or more"

    def wanted(self, rows: NDArray[np.int64]) -> bool:
        """True if decodes of these rows, one token each, gain by it; their step message was applied to the state."""
        if len(rows) < 2 or self._least is None:
            return len(rows) >= 2
        if self._entered != self._state.num_entered or len(self._answers) >= MOST_ANSWERS:
            self._answers.clear()
            self._entered = self._state.num_entered
        key = rows.tobytes()
        if key not in self._answers:
            self._answers[key] = self.saved_positions(rows) >= self._least
        return self._answers[key]

    def saved_positions(self, rows: NDArray[np.int64]) -> int:
        """At least so many positions are read again by other rows. Looks at a few places only, each twice as far as
        the one before: rows with the same block there share all before it (I5). Too many beyond 16k positions, where
        rows of unequal length are cut at other places and share only among those cut alike."""
        lengths, others = self._state.num_computed_tokens[rows], -1 - np.arange(len(rows), dtype=np.int32)
        blocks = self._state.host_block_table[rows, self._columns[:, None]]
        blocks = np.where(lengths >= self._ends[:, None], blocks, others)  # [places, N]
        blocks.sort(axis=1)
        repeated = (blocks[:, 1:] == blocks[:, :-1]).sum(axis=1)
        return int(repeated @ self._spans)


def select_cascade(
    config: EngineConfig, state: RowState, layers: Sequence[AttentionLayer], dtype: torch.dtype
) -> CascadeChoice | None:
    """The choice by option `cascade_attention`, backend and this stage's layers. ConfigError where `on` is impossible.

    `auto` leaves EXACT_DTYPES alone.
    """
    mode = config.cascade_attention
    specs = [spec for layer in layers if (spec := layer.cache_spec()) is not None]
    whole = [spec.bytes_per_token for spec in specs if spec.sliding_window is None]
    refused = None
    if not all(layer.shares_prefixes for layer in layers):
        refused = "the attention backend reads each request's context by itself: attention_backend=triton shares"
    elif config.pipeline_parallel_size == 1 and not whole:
        refused = "every layer of the model has a sliding window"
    if mode == "on" and refused is not None:
        raise ConfigError(f"cascade_attention=on: {refused}; use auto", param="cascade_attention")
    if mode == "off" or refused is not None or (mode == "auto" and dtype in EXACT_DTYPES) or not whole:
        return None
    position_bytes = sum(whole) // len(whole)
    return CascadeChoice(state, None if mode == "on" else -(-MIN_SAVED_BYTES // position_bytes))


def refuse_cascade(config: EngineConfig) -> None:
    """ConfigError for `on` with a pooling model: it has no decodes."""
    if config.cascade_attention == "on":
        raise ConfigError("cascade_attention=on: a pooling model has no decodes; use auto", param="cascade_attention")
