"""A whole decode step over static tensors, from the input token to the sampled one, as a function of nothing else.

Run as it is (on a CPU, in tests) or captured as CUDA graphs (cuda_graphs.py): the same lines, so what is tested here
is what is replayed there. Two parts: `forward` ends at the logits, `sample` draws from them and feeds the token back.
A step whose rows want more of the sampler (penalties, masks, logprobs) runs the first part and samples apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from app.engine.sampling.sampling_batch import HostParameters
from app.engine.worker.forward_pass import ForwardPass
from app.engine.worker.graphs.decode_inputs import DecodeInputs
from app.engine.worker.row_state import RowState
from app.kernels.attention import AttentionMetadata
from app.kernels.rows import StepTensors, begin_step
from app.kernels.sampling import sample_tokens


class Decode(Protocol):
    """A decode step that can be run at certain sizes: as it is, or from graphs."""

    step: DecodeStep

    def size_for(self, num_rows: int, *, cascade: bool = False) -> int | None:
        """The smallest size that holds so many rows; None: no size does. `cascade`: of those that share prefixes."""

    def forward(self, size: int, *, cascade: bool = False) -> None:
        """Compute the logits from the step's inputs."""

    def sample(self, size: int) -> None:
        """Sample the tokens from the logits."""

    def release(self) -> None:
        """Free what it was captured in."""


class DecodeStep:
    """Static tensors for up to sizes[-1] rows, and the step over them.

    In a pipeline it is this stage's part of the step: what the stages send each other lies in static tensors too, and
    travels outside of the step.
    """

    def __init__(
        self,
        forward: ForwardPass,
        state: RowState,
        sizes: Sequence[int],
        cascade_sizes: Sequence[int] = (),  # those of the sizes at which a step may read shared prefixes once
    ) -> None:
        self.sizes = sorted(sizes)
        self.cascade_sizes = sorted(cascade_sizes)
        self.inputs = DecodeInputs(self.sizes[-1], state.device)
        self.tensors = StepTensors.zeros(self.sizes[-1], self.sizes[-1], state.device, state.num_groups)
        link, dtype, most = forward.link, forward.dtype, self.sizes[-1]
        new_hidden = partial(torch.zeros, most, link.hidden_size, dtype=dtype, device=state.device)
        self.received = None if link.is_first else new_hidden()  # from the stage before
        self.sent = None if link.is_last else new_hidden()  # to the next one
        self.logits = torch.zeros(most if link.is_last else 0, forward.vocab_size, dtype=dtype, device=state.device)
        self.token_ids = torch.zeros(most, dtype=torch.int64, device=state.device)
        self._starts = torch.arange(self.sizes[-1] + 1, dtype=torch.int32, device=state.device)
        self._forward = forward
        self._state = state

    @property
    def step(self) -> DecodeStep:
        """The step itself, which runs without being captured."""
        return self

    def size_for(self, num_rows: int, *, cascade: bool = False) -> int | None:
        """The smallest size that holds so many rows; None: no size does. `cascade`: of those that share prefixes."""
        sizes = self.cascade_sizes if cascade else self.sizes
        index = bisect_left(sizes, num_rows)
        return sizes[index] if index < len(sizes) else None

    def release(self) -> None:
        """Nothing is captured here."""

    def load(self, rows: NDArray[np.int64], parameters: HostParameters | None) -> None:
        """Say which rows the step is for; `parameters` may be None where `sample` is not run."""
        self.inputs.load(rows, parameters)

    def forward(self, size: int, *, cascade: bool = False) -> None:
        """Input tokens, or received[:size] -> logits[:size], or sent[:size]; keys and values go into the cache, and the
        rows' counts move on."""
        state, tensors, starts = self._state, self.tensors.first(size), self._starts[: size + 1]
        begin_step(self.inputs.view(size).rows, starts, state.columns, tensors)
        table, *more = (table.index_select(0, tensors.rows) for table in state.block_tables)
        meta = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=tensors.seq_lens,
            block_table=table,
            slot_mapping=tensors.slots,
            max_query_len=1,
            max_seq_len=state.token_ids.shape[1],
            num_decodes=size,
            is_static=True,
            cascade=cascade,
            more_tables=tuple(zip(more, tensors.more_slots, strict=True)),
        )
        received = None if self.received is None else self.received[:size]
        hidden = self._forward.compute(tensors.input_ids, tensors.positions, meta, received)
        if self.sent is not None:
            self.sent[:size].copy_(hidden)
            return
        self.logits[:size].copy_(self._forward.raw_logits(hidden))

    def sample(self, size: int) -> None:
        """Sample in the last stage: logits[:size] -> token_ids[:size], and into the rows' token ids."""
        f, made = self.inputs.view(size), self.tensors.first(size)
        sampled, _ = sample_tokens(self.logits[:size], f.temperature, f.top_k, f.top_p, f.min_p, f.keys, made.lengths)
        self.token_ids[:size].copy_(sampled)
        self._state.flat_token_ids.index_copy_(0, made.targets, sampled.int())
