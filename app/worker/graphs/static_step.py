"""A whole step of rows that decode, over static tensors: from the input tokens to the sampled ones, as a function of
nothing else.

Run as it is (on a CPU, in tests) or captured as CUDA graphs (cuda_graphs.py): the same lines, so what is tested here
is what is replayed there. Two parts: `forward` ends at the logits; `sample` draws from them, feeds the tokens back and,
where the proposer's work is the device's alone, ends with its drafts. A step whose rows want more of the sampler
(penalties, masks, logprobs) runs the first part and samples apart.

A row has 1 + drafts places for tokens, all of which a step has whether the row fills them or not. What else a step has
besides plain decoding are its parts: each combination of them is a step of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from app.kernels.attention import AttentionMetadata
from app.kernels.drafts import REPEAT_PARAMETERS, LogitsPlaces
from app.kernels.rows import StepTensors
from app.kernels.sampling import SAMPLE_TOKENS
from app.layers.context import ForwardContext, HiddenStates
from app.platforms.to_device import to_device
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.static_inputs import StaticInputs
from app.worker.rows.row_state import RowState
from app.worker.rows.step_inputs import StepView
from app.worker.rows.worker_feature import NO_PARTS, WorkerFeatures
from app.worker.spec_decode.base import Proposal
from app.worker.spec_decode.drafting import Drafting

MOST_COMBINED = 3  # optional parts of which there is a step for each combination
# What changes the way of the layers, not their result. Of these a step has one at most.
CASCADE = "cascade"  # shared prefixes are read once
LONG = "long"  # a row's context is too long for all layers at once (models/whole_step.py)
OF_LAYERS = frozenset({CASCADE, LONG})
# Places without a token that a step with drafts may have. More take a GPU longer to compute than the host to launch an
# ordinary step, which has none.
MOST_EMPTY = 512


class StepKey(NamedTuple):
    """Tells one static step from another."""

    size: int  # rows
    parts: frozenset[str] = NO_PARTS
    drafts: int = 0  # places for drafts that each row has, and the drafts that it is left with where they are captured

    @property
    def kind(self) -> StepKey:
        """Stands for the steps of all sizes."""
        return self._replace(size=0)


class Static(Protocol):
    """A step over static tensors that can be run by certain keys: as it is, or from graphs."""

    step: StaticStep

    def key_for(self, num_rows: int, parts: frozenset[str], drafts: int = 0) -> StepKey | None:
        """The smallest step with these parts that holds so many rows with so many drafts; None: there is none."""

    def forward(self, key: StepKey) -> None:
        """Compute the logits from the step's inputs."""

    def sample(self, key: StepKey) -> None:
        """Sample the tokens from the logits."""

    def release(self) -> None:
        """Free what it was captured in."""


class StaticStep:
    """Static tensors for up to sizes[-1] rows, and the step over them.

    In a pipeline it is this stage's part of the step: what the stages send each other lies in static tensors too, and
    travels outside of the step. Where drafts are verified, so do the proposer's where they are not captured.
    """

    def __init__(
        self,
        forward: ForwardPass,
        state: RowState,
        features: WorkerFeatures,
        sizes: Sequence[int],
        cascade_sizes: Sequence[int] = (),  # those of the sizes at which a step may read shared prefixes once
        draft_counts: Sequence[int] = (),  # drafts for which rows may have places
        most_tokens: int = 1 << 30,  # of a step
        drafting: Drafting | None = None,  # in the last stage of an engine that drafts
    ) -> None:
        self.sizes = sorted(sizes)
        self.draft_counts = sorted(draft_counts)
        self._optional = frozenset(features.parts)
        bounds = ((size, forward.model.longest_at_once(size)) for size in self.sizes)
        self._longest = {size: bound for size, bound in bounds if bound and bound < state.token_ids.shape[1]}
        self._sizes_of = _sizes_by_kind(
            features.parts,
            self.sizes,
            {CASCADE: sorted(cascade_sizes), LONG: list(self._longest)},
            {count: [size for size in self.sizes if size * (1 + count) <= most_tokens] for count in self.draft_counts},
        )
        self.inputs = StaticInputs(state.inputs, self.sizes[-1], state.device)
        rows, device = self.sizes[-1], state.device
        places = max(key.size * self.places_each(key) for key in self.keys)
        self.tensors = StepTensors.zeros(places, rows, device, state.num_groups)
        new = partial(torch.zeros, dtype=forward.dtype, device=device)
        link = forward.link
        self.received = None if link.is_first else new(places, forward.received_width)  # from the stage before
        self.sent = None if link.is_last else new(places, forward.sent_width)  # to the next one
        self.logits = new(places if link.is_last else 0, forward.vocab_size)
        self.token_ids = torch.zeros(places, dtype=torch.int64, device=device)
        self.num_new = torch.zeros(rows, dtype=torch.int64, device=device)  # tokens that each row got
        # Hidden states for the proposer (None: of the last layer), and what features brought to the layers.
        self._kept: dict[int | None, torch.Tensor] = {}
        self._brought: dict[str, torch.Tensor] = {}
        self._names: dict[frozenset[str], list[str]] = {}  # of those that a step with these parts brings
        if drafting is not None:
            self._kept = {layer: new(places, link.hidden_size) for layer in (None, *drafting.proposer.reads_layers)}
        self._starts = {1 + count: _starts(rows, 1 + count, device) for count in (0, *self.draft_counts)}
        self._sample_tokens, self._repeat = SAMPLE_TOKENS.on(device), REPEAT_PARAMETERS.on(device)
        self._forward = forward
        self._state = state
        self._features = features
        self._sampled = features.logits_parts  # parts that the sampling has, whoever proposes
        self._only_sampled = features.logits_parts - features.forward_parts
        self._drafting = drafting

    @property
    def step(self) -> StaticStep:
        """The step itself, which runs without being captured."""
        return self

    @property
    def keys(self) -> list[StepKey]:
        """All steps that there are; first those that are most needed, of each kind the largest first."""
        return [kind._replace(size=size) for kind, sizes in self._sizes_of.items() for size in reversed(sizes)]

    def key_for(self, num_rows: int, parts: frozenset[str], drafts: int = 0) -> StepKey | None:
        """See Static."""
        return self.smallest(self._sizes_of, num_rows, parts, drafts)

    def smallest(
        self, sizes_of: Mapping[StepKey, Sequence[int]], num_rows: int, parts: frozenset[str], drafts: int
    ) -> StepKey | None:
        """The step with the fewest places that serves, of the kinds with these ascending sizes; None: none does.

        Where no step has just these parts, all of them: rows that do not use a part are what they are without it.
        """
        if StepKey(0, parts) not in self._sizes_of:
            parts |= self._optional
        for count in (0, *self.draft_counts):
            kind = StepKey(0, parts, count)
            sizes = sizes_of.get(kind, ())
            index = bisect_left(sizes, num_rows)
            if count >= drafts and index < len(sizes):
                return kind._replace(size=sizes[index])
        return None

    def forward_key(self, key: StepKey) -> StepKey:
        """The key for `forward`, which ends before anything changes the logits."""
        return key._replace(parts=key.parts - self._only_sampled)

    def sample_key(self, key: StepKey) -> StepKey:
        """The key for `sample`, to which it is all one what the layers computed, unless it ends with a proposal."""
        proposes = self._drafting is not None and self._drafting.proposer.is_capturable
        return key._replace(parts=key.parts - OF_LAYERS if proposes else key.parts & self._sampled)

    def is_long(self, rows: NDArray[np.int64]) -> bool:
        """True if a step of these rows, one token each, gains by LONG."""
        index = bisect_left(self.sizes, len(rows))
        longest = self._longest.get(self.sizes[index]) if index < len(self.sizes) else None
        return longest is not None and bool((self._state.num_computed_tokens[rows] >= longest).any())

    def places_each(self, key: StepKey) -> int:
        """Places for tokens that each row has."""
        return 1 + key.drafts

    def filled(self, key: StepKey, counts: NDArray[np.int32]) -> slice | torch.Tensor:
        """The places of the T tokens of rows that bring `counts` [N]. Stages send each other these alone, as they do in
        ordinary steps: so each decides for itself how it runs a step."""
        each = self.places_each(key)
        if (counts == each).all():
            return slice(len(counts) * each)
        skipped = np.arange(len(counts)) * each - (np.cumsum(counts) - counts)
        return to_device(np.repeat(skipped, counts) + np.arange(counts.sum()), self._state.device)

    def release(self) -> None:
        """Nothing is captured here."""

    def forward(self, key: StepKey) -> None:
        """Input tokens, or `received`, -> logits, or `sent`; keys and values go into the cache, and the rows' counts
        move on."""
        inputs, view = self._view(key)
        counts = inputs["counts"] if self.places_each(key) > 1 else None
        self._state.begin_step(inputs["rows"], view.starts, self._state.columns, view.tensors, counts)
        self._features.inputs(view, key.parts)
        if self._drafting is not None:
            self._keep_inputs(view, key)
        num_places = len(view.tensors.positions)
        received = None if self.received is None else self.received[:num_places]
        hidden = self._forward.compute(view.tensors.input_ids, self._context(key, view, received))
        self._features.hidden(view, hidden, key.parts)
        for layer, kept in self._kept.items():
            kept[:num_places].copy_(hidden.last if layer is None else hidden.inputs_of[layer])
        if self.sent is not None:
            self.sent[:num_places].copy_(self._forward.to_send(hidden))
            return
        self.logits[:num_places].copy_(self._forward.raw_logits(hidden.last))

    def sample(self, key: StepKey) -> None:
        """Sample in the last stage: logits -> `token_ids` and `num_new`, and into the rows' token ids."""
        inputs, view = self._view(key)
        made, each = view.tensors, self.places_each(key)
        names = ("temperature", "top_k", "top_p", "min_p", "keys")
        parameters = tuple(inputs[name] for name in names)
        temperature, top_k, top_p, min_p, keys = parameters if each == 1 else self._repeat(parameters, each)
        logits = self._features.logits(view, self.logits[: len(made.lengths)], key.parts)
        sampled, _ = self._sample_tokens(logits, temperature, top_k, top_p, min_p, keys, made.lengths)
        self.token_ids[: len(sampled)].copy_(sampled)
        if self._drafting is None:
            self._state.flat_token_ids.index_copy_(0, made.targets, sampled.int())
            return
        rows = inputs["rows"]
        places = None if each == 1 else LogitsPlaces(view.starts[:-1], inputs["counts"])
        num_new, ends = self._drafting.keep(rows, places, made.targets, sampled)
        self.num_new[: key.size].copy_(num_new)
        self.settle_states(key, num_new)
        if self._drafting.proposer.is_capturable:
            self._drafting.propose(rows, self._proposal(key, view, num_new, ends, key.drafts))

    def settle_states(self, key: StepKey, num_new: torch.Tensor) -> None:
        """The step's first N rows have got `num_new` int64 [N] tokens, behind which their states are to be."""
        states = None if self._drafting is None else self._drafting.states
        if states is not None and self.places_each(key) > 1:
            states.accept(self._context(key, self._view(key)[1], None), num_new)

    def propose(self, key: StepKey, num_new: torch.Tensor, num_drafts: int) -> None:
        """The drafts of the step's first N rows, none of which pads and which got `num_new` int64 [N] tokens, after a
        step by this key that did not end with them."""
        assert self._drafting is not None
        view = self._view(key)[1]
        ends = view.starts[: len(num_new)] + num_new - 1
        proposal = self._proposal(key, view, num_new, ends, num_drafts)
        self._drafting.propose(view.tensors.rows[: len(num_new)], proposal)

    def _view(self, key: StepKey) -> tuple[dict[str, torch.Tensor], StepView]:
        inputs, each = self.inputs.view(key.size), self.places_each(key)
        return inputs, StepView(self.tensors.first(key.size, each), self._starts[each][: key.size + 1], inputs)

    def _context(self, key: StepKey, view: StepView, received: torch.Tensor | None) -> ForwardContext:
        state, each, tensors = self._state, self.places_each(key), view.tensors
        table, *more = (table.index_select(0, tensors.rows) for table in state.block_tables)
        meta = AttentionMetadata(
            query_start_loc=view.starts,
            seq_lens=tensors.seq_lens,
            block_table=table,
            slot_mapping=tensors.slots,
            max_query_len=each,
            max_seq_len=state.token_ids.shape[1],
            num_decodes=key.size if each == 1 else 0,
            is_static=True,
            is_apart=each == 1,
            cascade=CASCADE in key.parts,
            by_layers=LONG in key.parts,
            more_tables=tuple(zip(more, tensors.more_slots, strict=True)),
            rows=tensors.rows,
        )
        return self._forward.context(tensors.positions, meta, received, view.layer_inputs)

    def _keep_inputs(self, view: StepView, key: StepKey) -> None:
        """Copies what layers are given from where the forward pass made it to where the proposer finds it."""
        num_places = len(view.tensors.positions)
        self._names[self.forward_key(key).parts - OF_LAYERS] = list(view.layer_inputs)
        for name, tensor in view.layer_inputs.items():
            if name not in self._brought:
                self._brought[name] = tensor.new_zeros(len(self.tensors.positions), *tensor.shape[1:])
            self._brought[name][:num_places].copy_(tensor)

    def _proposal(
        self, key: StepKey, view: StepView, num_new: torch.Tensor, ends: torch.Tensor, num_drafts: int
    ) -> Proposal:
        """`ends` int64 [N]: see Proposal."""
        num_places = len(view.tensors.positions)
        names = self._names[self.forward_key(key).parts - OF_LAYERS]
        view.layer_inputs.update((name, self._brought[name][:num_places]) for name in names)
        kept = {layer: tensor[:num_places] for layer, tensor in self._kept.items()}
        last = kept.pop(None)
        return Proposal(
            rows=view.tensors.rows[: len(num_new)].long(),
            num_new=num_new,
            ends=ends,
            columns=self._state.columns,
            view=view,
            hidden=HiddenStates(last, {layer: x for layer, x in kept.items() if layer is not None}),
            ctx=self._context(key, view, None),
            plan=self._forward.context,
            num_drafts=num_drafts,
        )


def _sizes_by_kind(
    optional: Sequence[str], sizes: list[int], of_layers: Mapping[str, list[int]], with_drafts: Mapping[int, list[int]]
) -> dict[StepKey, list[int]]:
    """The combinations of parts that a step may have, the most common first: where there are many parts, none, each
    alone and all. Steps with drafts are the rule in an engine that drafts; they share no prefixes, which kernels do for
    one query a row."""
    counts = range(len(optional) + 1) if len(optional) <= MOST_COMBINED else (0, 1, len(optional))
    found: dict[StepKey, list[int]] = {}
    for kind in (frozenset(chosen) for count in counts for chosen in combinations(optional, count)):
        found |= {StepKey(0, kind, drafts): own for drafts, own in reversed([*with_drafts.items()]) if own}
        found[StepKey(0, kind)] = sizes
        found |= {StepKey(0, kind | {part}): own for part, own in of_layers.items() if own}
    return found


def _starts(num_rows: int, each: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num_rows + 1, dtype=torch.int32, device=device) * each
