"""The feature that aligns the tokens of a transcript with the sound: how much each attends to each position of it.

Some heads of a decoder's cross attention follow the speaker (Radford et al., 2022; which ones the model's settings
say). A request that asks brings the whole transcript as its prompt, so all of it is computed in one step or a few
chunks, and steps of others stay as they are: layers leave queries only for tokens of such rows. Weights are made of
them as Whisper's own program does it: those of a position are normed over all tokens, and smoothed by a median over
positions; the mean of the heads is the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from app.layers.context import HiddenStates
from app.layers.cross_attention import ASKED, LEFT, CrossAttention
from app.models.multimodal.whisper import WhisperForConditionalGeneration
from app.platforms.to_device import to_device
from app.records.alignment_ask import AlignmentAsk
from app.records.alignment_heads import AlignmentHeads
from app.records.step import NewRequest, SchedulerOutput
from app.worker.features.context import FeatureContext
from app.worker.forward_pass import ForwardPass
from app.worker.media.encoder_inputs import SLOT
from app.worker.rows.pending_step import PooledRows, StepResults
from app.worker.rows.step_inputs import HostRows, StepInput, StepView
from app.worker.rows.worker_feature import WorkerFeature


@dataclass(slots=True, frozen=True)
class FollowingHeads:
    """Those heads of a layer that follow the sound, by their numbers on this rank."""

    layer: CrossAttention
    heads: tuple[int, ...]


@dataclass(slots=True)
class _Row:
    """A request whose prompt is not computed yet."""

    ask: AlignmentAsk
    num_tokens: int  # of the prompt
    num_seen: int = 0  # of those that are asked for
    queries: list[torch.Tensor] = field(default_factory=list)  # [tokens, heads, D] of each chunk, all layers' heads


@dataclass(slots=True, frozen=True)
class _Chunk:
    """Tokens of a prompt in a step that are asked for."""

    index: int  # of the step's rows
    number: int  # of the row
    places: NDArray[np.int64]  # of the tokens in the step
    is_last: bool


class Alignment(WorkerFeature):
    """Holds the queries of prompts that ask, until these are computed."""

    def __init__(
        self,
        following: Sequence[FollowingHeads],
        alignment: AlignmentHeads,
        slot: StepInput,
        forward: ForwardPass,
        device: torch.device,
        most: tuple[int, int],
    ) -> None:
        """`following`: at least one layer, even where none of its heads is on this rank; `alignment`: of all ranks;
        `most`: tokens of a step, and of a request."""
        self._following, self._num_heads, self._width = following, len(alignment.heads), alignment.median_width
        self._slot, self._cache, self._most = slot, forward.cache, most
        self._dtype, self._device = forward.dtype, device
        self._rows: dict[int, _Row] = {}
        self._chunks: list[_Chunk] = []  # of the step that is being computed
        self._left: list[torch.Tensor] = []  # [tokens * heads, D] of each layer with such heads
        self._found: dict[int, torch.Tensor] = {}  # by index of the step's rows

    # ---- rows

    def leave(self, row: int) -> None:
        """The row was freed."""
        self._rows.pop(row, None)

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        self._rows.pop(row, None)
        ask = request.spec.asked(AlignmentAsk)
        if ask is not None and request.num_computed_tokens <= ask.first < request.num_prompt_tokens:
            self._rows[row] = _Row(ask, request.num_prompt_tokens)

    # ---- the step

    def is_ordinary(self, rows: NDArray[np.int64]) -> bool:
        """True where the last token of a prompt is asked for."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(rows.tolist())

    def inputs(self, view: StepView) -> None:
        """Has layers leave queries, where the step brings tokens that are asked for."""
        self._chunks, self._left = [], []
        if view.host is None or not self._rows:
            return
        self._chunks = list(self._asked(view.host))
        if not self._chunks:
            return
        places = np.concatenate([chunk.places for chunk in self._chunks])
        for layer, heads in ((one.layer, one.heads) for one in self._following if one.heads):
            asked = places[:, None] * layer.num_heads + np.array(heads, np.int64)
            left = torch.empty(asked.size, layer.head_dim, dtype=self._dtype, device=self._device)
            view.layer_inputs[f"{ASKED}{layer.layer_index}"] = to_device(asked.reshape(-1), self._device)
            view.layer_inputs[f"{LEFT}{layer.layer_index}"] = left
            self._left.append(left)

    def _asked(self, host: HostRows) -> Iterator[_Chunk]:
        for index, number in enumerate(host.rows.tolist()):
            row = self._rows.get(number)
            if row is None:
                continue
            first, start = int(host.first_positions[index]), int(host.starts[index])
            end = min(first + int(host.starts[index + 1]) - start, row.num_tokens)
            begin = max(first, row.ask.first)
            places = np.arange(begin, end, dtype=np.int64) - first + start
            yield _Chunk(index, number, places, end == row.num_tokens)

    def reads_all(self, rows: NDArray[np.int64]) -> bool:
        """False: it reads queries, and none of the hidden states."""
        return False

    def hidden(self, view: StepView, hidden: HiddenStates) -> None:
        """Takes the queries, and aligns the prompts that end."""
        if not self._chunks:
            return
        counts = [len(chunk.places) for chunk in self._chunks]
        queries = torch.split(self._queries(sum(counts)), counts)
        for chunk, own in zip(self._chunks, queries, strict=True):
            row = self._rows[chunk.number]
            row.num_seen += len(own)
            row.queries.append(own if chunk.is_last else own.clone())
            if chunk.is_last:
                del self._rows[chunk.number]
                if row.num_seen == row.num_tokens - row.ask.first:
                    slot = int(self._slot.values[chunk.number])
                    self._found[chunk.index] = self._aligned(torch.cat(row.queries), slot, row.ask.num_positions)
        self._chunks, self._left = [], []

    def _queries(self, count: int) -> torch.Tensor:
        """[count, heads, D] of all layers' heads on this rank."""
        size = self._following[0].layer.head_dim
        none = torch.empty(count, 0, size, dtype=self._dtype, device=self._device)
        return torch.cat([none, *(left.view(count, -1, size) for left in self._left)], dim=1)

    def _aligned(self, queries: torch.Tensor, slot: int, num_positions: int) -> torch.Tensor:
        """fp32 [n, num_positions] of the queries [n, heads, D] of this rank's heads."""
        num_positions = min(num_positions, self._following[0].layer.num_positions)
        total = torch.zeros(len(queries), num_positions, device=queries.device)
        at = 0
        for one in self._following:
            layer, cache = one.layer, self._cache.tensors[one.layer.layer_index]
            for head in one.heads:
                weights = layer.weights(queries[:, at], head, slot, cache)[:, :num_positions]
                total += smoothed(weights, self._width)
                at += 1
        return self._following[0].layer.tp.all_reduce(total) / self._num_heads

    def after(self, step: SchedulerOutput, results: StepResults) -> None:
        """Hand over what the step's prompts gave."""
        if not self._found:
            return
        found, self._found = self._found, {}
        places = {index: place for place, index in enumerate(np.flatnonzero(step.samples).tolist())}
        parts = [([places[index]], one.unsqueeze(0)) for index, one in found.items() if index in places]
        results.pooled = PooledRows(len(places), parts)

    # ---- memory

    def run_largest(self) -> None:
        """Queries of as many tokens as a step has, and the alignment of the longest prompt."""
        size, heads = self._following[0].layer.head_dim, sum(len(one.heads) for one in self._following)
        most, longest = self._most
        kept = torch.zeros(max(most, longest), heads, size, dtype=self._dtype, device=self._device)
        self._aligned(kept[:longest], 0, self._following[0].layer.num_positions)


def smoothed(weights: torch.Tensor, median_width: int) -> torch.Tensor:
    """Weights fp32 [n, P] of a head, those of each position normed over all tokens (mean 0, deviation 1), and then the
    median of `median_width` positions around each, beyond the ends mirrored; all as they are where P is too few."""
    deviation, mean = torch.std_mean(weights, dim=0, keepdim=True, unbiased=False)
    normed = (weights - mean) / deviation.clamp(min=torch.finfo(torch.float32).tiny)
    beside = median_width // 2
    if normed.shape[1] <= beside:
        return normed
    around = F.pad(normed, (beside, beside), mode="reflect").unfold(-1, median_width, 1)
    return around.sort(-1).values[..., beside]


def following_heads(layers: Sequence[CrossAttention], heads: Sequence[tuple[int, int]]) -> list[FollowingHeads]:
    """The layers of a stage that has all, in their order, with those heads (layer, head) that are on this rank."""
    found = []
    for number, named in groupby(sorted(heads), key=lambda one: one[0]):
        layer = layers[number]
        own = [head - layer.first_kv_head for _, head in named]
        found.append(FollowingHeads(layer, tuple(head for head in own if 0 <= head < layer.num_heads)))
    return found


def create(context: FeatureContext) -> Alignment | None:
    """The feature, where heads of the model follow the sound, and one stage has them all."""
    model, link, state = context.forward.model, context.forward.link, context.state
    assert isinstance(model, WhisperForConditionalGeneration)
    if not model.alignment.heads or not (link.is_first and link.is_last):
        return None
    most = context.config.max_num_batched_tokens, int(state.token_ids.shape[1])
    following, slot = following_heads(model.cross_layers, model.alignment.heads), state.inputs.lines[SLOT]
    return Alignment(following, model.alignment, slot, context.forward, state.device, most)
