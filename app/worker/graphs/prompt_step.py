"""The layers of a step with prompts over static tensors, by how many tokens it has: from token ids to hidden states.

Around it the step is an ordinary one: features bring nothing to its layers, and the head samples as it always does. The
step's tokens go into tensors at fixed addresses, those of rows that decode first, the prompts' behind them. Places that
are left are padding, as of static steps of rows that decode: a decode that pads is a row, and the places behind the
prompts' tokens are a row of their own. Both have no slot (-1), and no other row's length changes by them.

Run as it is (on a CPU, in tests) or captured (prompt_graphs.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.rows import StepTensors
from app.layers.context import HiddenStates
from app.layers.rotary import ROPE_POSITIONS
from app.records.step_places import DECODE_PLACES, FEWEST_ROUNDS, FULL_PLACES, ROUND
from app.worker.forward_pass import ForwardPass
from app.worker.rows.input_batch import InputBatch
from app.worker.rows.row_state import RowState

LEAST_TOKENS, MOST_TOKENS = 64, 2048  # of prompts: more keep any device busy
# (sizes up to, distance between them): past the first few, a fifth of a step's tokens is padding at most.
SIZE_TABLE = ((512, 64), (1024, 128), (MOST_TOKENS, 256), (1 << 30, 512))


class PromptKey(NamedTuple):
    """Tells one such step from another."""

    tokens: int  # places for those of prompts
    prompts: int  # of which they are, at most
    decodes: int = 0  # places of rows that decode

    @property
    def kind(self) -> PromptKey:
        """Stands for the steps of all sizes."""
        return self._replace(tokens=0)

    @property
    def places(self) -> int:
        """Tokens, the padding among them."""
        return self.decodes + self.tokens

    @property
    def rows(self) -> int:
        """Rows: one more than bring tokens, which pads."""
        return self.decodes + self.prompts + 1


# A prompt alone is the most needed; many rows would be programs of attention without anything to do.
PLACES = (*DECODE_PLACES, *FULL_PLACES)
KINDS = (PromptKey(0, 1), PromptKey(0, 4), *(PromptKey(0, 4, decodes) for decodes in PLACES))
MOST_FURTHER = 128  # more tokens than the next size has, of a step that may be quicker


def prompt_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture a step for, ascending, up to `most`: more than there are rows (KINDS)."""
    sizes: list[int] = []
    if most < LEAST_TOKENS:
        return sizes
    while (size := sizes[-1] if sizes else 0) < most:
        sizes.append(min(most, size + next(distance for limit, distance in SIZE_TABLE if size < limit)))
    return sizes


class PromptStep:
    """Static tensors for the largest of such steps, and the steps over them."""

    def __init__(self, forward: ForwardPass, state: RowState, most_tokens: int) -> None:
        self._forward, self._state, self._takes_context = forward, state, forward.captures_context
        self.device = state.device
        max_num_seqs, width = state.token_ids.shape
        self.sizes = prompt_sizes(min(most_tokens, width))  # all of a step may be padding, which is a row as others
        self.kinds = [kind for kind in KINDS if kind.decodes + kind.prompts <= max_num_seqs]
        places = max((key.places for key in self.keys), default=0)
        rows = max(kind.rows for kind in KINDS)
        self._tensors = StepTensors.zeros(places, rows, state.device, state.num_groups)
        # Where the tokens of each row begin; rows that decode have one place each.
        first = torch.arange(rows + 1, dtype=torch.int32, device=state.device)
        self._starts = {kind.decodes: first.clone() for kind in KINDS}
        self._hidden: HiddenStates | None = None  # of the most places there are, of the last run

    @property
    def keys(self) -> list[PromptKey]:
        """All steps that there are: the largest, in whose memory the others fit, then those that are most needed, of
        each kind the largest first."""
        found = [kind._replace(tokens=size) for kind in self.kinds for size in reversed(self._sizes_of(kind))]
        largest = max(found, key=lambda key: key.places, default=None)
        return sorted(found, key=lambda key: key != largest)

    def _next_of(self, kind: PromptKey, tokens: int) -> list[PromptKey]:
        most = self.sizes[bisect_left(self.sizes, tokens)] + MOST_FURTHER
        return [kind._replace(tokens=size) for size in self._sizes_of(kind) if tokens <= size <= most]

    def _sizes_of(self, kind: PromptKey) -> list[int]:
        """Numbers of tokens; those of steps with rows that decode also fill whole rounds with them, or only do."""
        if not kind.decodes or not self.sizes:
            return self.sizes
        whole = [rows - kind.decodes for rows in range(ROUND, self.sizes[-1] + 1, ROUND)]
        if kind.decodes in FULL_PLACES:
            return whole[FEWEST_ROUNDS - 1 :]
        return sorted({*self.sizes, *(size for size in whole if size >= LEAST_TOKENS)})

    def limit(self, most_tokens: int) -> None:
        """Steps of more tokens are none of these."""
        self.sizes = [size for size in self.sizes if size <= most_tokens]

    def keys_for(self, meta: AttentionMetadata) -> Sequence[PromptKey]:
        """Those of the steps that such a one can run as, the smallest first."""
        decodes, prompts = meta.num_decodes, len(meta.seq_lens) - meta.num_decodes
        tokens = len(meta.slot_mapping) - decodes
        if not prompts or not self.sizes or tokens > self.sizes[-1] or not (self._takes_context or _begin(meta)):
            return ()
        fitting = [kind for kind in self.kinds if kind.prompts >= prompts and kind.decodes >= decodes]
        kinds = [kind for kind in fitting if decodes or not kind.decodes]
        keys = [key for kind in kinds for key in self._next_of(kind, tokens)]
        return sorted(keys, key=lambda key: key.tokens)

    def load(self, key: PromptKey, batch: InputBatch) -> None:
        """The tokens and rows of a step for the next run."""
        meta, own, starts = batch.attention, self._tensors, self._starts[key.decodes]
        decodes, end_row = meta.num_decodes, key.decodes + len(meta.seq_lens) - meta.num_decodes
        shift = key.decodes - decodes
        end = len(batch.positions) + shift
        slots = [meta.slot_mapping, *(slots for _, slots in meta.more_tables)]
        assert meta.rows is not None, "the step's maker names its rows"
        _put(own.input_ids, batch.input_ids, decodes, shift)
        # Who rotates by other positions than a token's own reads them for nothing else.
        _put(own.positions, batch.view.layer_inputs.get(ROPE_POSITIONS, batch.positions), decodes, shift)
        for ours, given in zip((own.slots, *own.more_slots), slots, strict=True):
            _put(ours, given, decodes, shift)
            ours[decodes : key.decodes].fill_(-1)
            ours[end : key.places].fill_(-1)
        _put(own.rows, meta.rows, decodes, shift)
        own.rows[decodes : key.decodes].zero_()
        own.rows[end_row:].zero_()
        _put(own.seq_lens, meta.seq_lens, decodes, shift)
        own.seq_lens[decodes : key.decodes].fill_(1)
        own.seq_lens[end_row : end_row + 1].fill_(key.places - end)
        own.seq_lens[end_row + 1 :].zero_()
        torch.add(meta.query_start_loc[decodes:], shift, out=starts[key.decodes : end_row + 1])
        starts[end_row + 1 :].fill_(key.places)

    def pad_all(self, key: PromptKey) -> None:
        """A step that nobody asked for: for warming up and capture."""
        own, starts = self._tensors, self._starts[key.decodes]
        for slots in (own.slots, *own.more_slots):
            slots.fill_(-1)
        own.rows.zero_()
        own.seq_lens[: key.decodes].fill_(1)
        own.seq_lens[key.decodes].fill_(key.tokens)
        own.seq_lens[key.decodes + 1 :].zero_()
        starts[key.decodes].fill_(key.decodes)
        starts[key.decodes + 1 :].fill_(key.places)

    def run(self, key: PromptKey) -> None:
        """Token ids -> hidden states; keys and values go into the cache."""
        own, width = self._tensors, key.places
        table, *more = (table.index_select(0, own.rows[: key.rows]) for table in self._state.block_tables)
        meta = AttentionMetadata(
            query_start_loc=self._starts[key.decodes][: key.rows + 1],
            seq_lens=own.seq_lens[: key.rows],
            block_table=table,
            slot_mapping=own.slots[:width],
            max_query_len=key.tokens,
            max_seq_len=self._state.token_ids.shape[1],
            num_decodes=key.decodes,
            is_static=True,
            holds_prompts=True,
            more_tables=tuple(zip(more, own.more_slots[:, :width], strict=True)),
            rows=own.rows[: key.rows],
        )
        ends = meta.query_start_loc[1:] - 1 if self._forward.reads_ends else None
        ctx = self._forward.context(own.positions[:width], meta, ends=ends)
        hidden = self._forward.compute(own.input_ids[:width], ctx)
        if self._hidden is None:  # in the run before the first is recorded
            most = len(own.positions) if ends is None else len(own.seq_lens)
            self._hidden = hidden.map(lambda x: x.new_empty(most, *x.shape[1:]))
        self._hidden.last[: len(hidden.last)].copy_(hidden.last)
        for layer, x in hidden.inputs_of.items():
            self._hidden.inputs_of[layer][:width].copy_(x)

    def hidden_of(self, key: PromptKey, batch: InputBatch) -> HiddenStates:
        """The hidden states of the step that was loaded and run."""
        assert self._hidden is not None, "a replay of what never ran"
        decodes = batch.attention.num_decodes
        count = len(batch.attention.seq_lens if self._hidden.of_ends else batch.positions)
        if key.decodes == decodes:
            return self._hidden.map(lambda x: x[:count])
        end = key.decodes + count - decodes
        return self._hidden.map(lambda x: torch.cat((x[:decodes], x[key.decodes : end])))


def _begin(meta: AttentionMetadata) -> bool:
    """True if nothing is cached of the step's prompts."""
    assert meta.host_lens is not None, "a step with prompts is made on the host"
    tokens = len(meta.slot_mapping) - meta.num_decodes
    return bool(meta.host_lens[meta.num_decodes :].sum() == tokens)


def _put(own: torch.Tensor, given: torch.Tensor, decodes: int, shift: int) -> None:
    """The first `decodes` entries where they are, the others `shift` places on."""
    if decodes and shift:
        own[:decodes].copy_(given[:decodes])
        own[decodes + shift : len(given) + shift].copy_(given[decodes:])
    else:
        own[shift : len(given) + shift].copy_(given)
