"""The feature that shows a model pictures: embeddings in the places of their tokens, and positions to rotate by.

An item is encoded whole before the first step that computes a token of its; what the encoder gave is kept by digest,
so that later chunks, and other requests with the same item, find it. Steps over static tensors only decode: to them it
is one line of the rows' table, by which a row's positions differ from the indices of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from app.kernels.attention.both_ways import PictureSpan
from app.layers.picture_attention import SPANS, PictureAttention
from app.layers.rotary import ROPE_POSITIONS
from app.layers.shown import show
from app.models.multimodal.base import MediaEncoder, Picture, SeeingModel
from app.platforms import platform_of
from app.platforms.to_device import to_device
from app.records.media import VALUE_TYPES, MediaItem, media_of
from app.records.sized_cache import SizedCache
from app.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from app.records.worker_info import WorkerInfo
from app.worker.features.context import FeatureContext
from app.worker.media.encoder_graphs import NoGraphs, create_graphs
from app.worker.media.shown_prompt import Int64Array, PositionRule, ShownItem, rope_positions, shown_items
from app.worker.rows.pending_step import StepClock, StepResults
from app.worker.rows.step_inputs import HostRows, StepInputs, StepView
from app.worker.rows.worker_feature import WorkerFeature
from app.worker.warmup.plan import PICTURES

QUERIES, HITS = "mm_cache_queries", "mm_cache_hits"  # figures


@dataclass(slots=True, frozen=True)
class EncoderLimits:
    """Bounds what encoding takes."""

    cache_bytes: int  # of what encoders gave
    max_item_tokens: int
    token_bytes: int  # of one token's embeddings
    context_tokens: int = 0  # of the longest prompt


@dataclass(slots=True)
class _Row:
    """A request of whose prompt tokens are left that are shown something, or do not count on as text does."""

    end: int  # behind the last of these
    items: list[ShownItem]  # of which tokens are left
    positions: Int64Array | None  # [num_prompt_tokens, 3]; None: the model has none of its own


@dataclass(slots=True)
class _Chunk:
    """Tokens of a prompt in a step."""

    index: int  # of the step's rows
    number: int  # of the row
    row: _Row
    start: int  # in the step
    first: int  # in the prompt
    end: int

    def wanted(self) -> list[tuple[ShownItem, slice]]:
        """The items that it shows pieces of, and which."""
        found = ((shown, shown.between(self.first, self.end)) for shown in self.row.items)
        return [(shown, pieces) for shown, pieces in found if pieces.stop > pieces.start]


def _spans(chunks: Sequence[_Chunk]) -> list[tuple[int, ...]]:
    """The fields of a PictureSpan for each item of the chunks, which hold the rest of it."""
    found = []
    for chunk in chunks:
        for shown, _ in chunk.wanted():
            if shown.item.kind == "audio":
                continue
            begin, end = int(shown.places[0]), int(shown.places[-1]) + 1
            first = max(begin, chunk.first)
            assert end <= chunk.end, "a picture whose tokens see each other is cut"
            found.append(astuple(PictureSpan(chunk.index, first - chunk.first + chunk.start, first, begin, end)))
    return found


@dataclass(slots=True)
class _Figures:
    values: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, count: int) -> None:
        self.values[name] = self.values.get(name, 0) + count


class Media(WorkerFeature):
    """Holds the prompts with pictures that rows are computing."""

    def __init__(
        self,
        model: SeeingModel,
        inputs: StepInputs,
        device: torch.device,
        dtype: torch.dtype,
        limits: EncoderLimits,
        graphs: NoGraphs,
    ) -> None:
        assert model.media is not None
        self._dtype, self._graphs = dtype, graphs
        self._model, self._media, self._device, self._limits = model, model.media, device, limits
        self._encoders = [encoder for encoder in (model.encoder, model.ears) if encoder is not None]
        self._rule = PositionRule(model.media.spatial_merge, model.rope_seconds, model.positions_by_time)
        self._delta = inputs.declare("rope_delta", torch.int64) if model.has_axes else None
        self._cache: SizedCache[torch.Tensor] = SizedCache(limits.cache_bytes)
        self._rows: dict[int, _Row] = {}
        self._figures = _Figures()
        self._runtime, self._apart = platform_of(device).runtime, list[StepClock]()

    # ---- rows

    def leave(self, row: int) -> None:
        """The row was freed."""
        self._rows.pop(row, None)

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row."""
        self._rows.pop(row, None)
        ask, delta = media_of(request.spec.asks), 0
        if ask is not None:
            prompt = request.token_ids[: request.num_prompt_tokens]
            items, positions = shown_items(prompt, ask, self._media), None
            end = max((shown.item.end for shown in items), default=0)
            if self._delta is not None:
                positions, delta = rope_positions(items, len(prompt), self._rule)
                if (positions[end:, 0] != np.arange(end, len(prompt)) + delta).any():
                    end = len(prompt)  # as behind a video of more frames than rows
            if request.num_computed_tokens < end:
                left = [shown for shown in items if shown.item.end > request.num_computed_tokens]
                self._rows[row] = _Row(end, left, positions)
        if self._delta is not None:
            self._delta.set(row, delta)

    # ---- the step

    def is_ordinary(self, rows: NDArray[np.int64]) -> bool:
        """True where a token of a prompt may show something, or have positions of its own."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(rows.tolist())

    def inputs(self, view: StepView) -> None:
        """Brings `rope_positions` [T] or [T, 3], and what the step shows."""
        if view.host is None:
            if self._delta is not None:
                view.layer_inputs[ROPE_POSITIONS] = view.tensors.positions + view.of_tokens("rope_delta")
            return
        chunks = self._chunks(view.host)
        if self._delta is not None and (chunks or self._delta.values[view.host.rows].any()):
            view.layer_inputs[ROPE_POSITIONS] = self._positions(view, chunks)
        if chunks and self._encoders:
            self._show(view, chunks)
        if self._model.seen_both_ways and (spans := _spans(chunks)):
            view.layer_inputs[SPANS] = torch.tensor(spans, device="cpu")
        for chunk in chunks:
            chunk.row.items = [shown for shown in chunk.row.items if shown.item.end > chunk.end]
            if chunk.end >= chunk.row.end:
                del self._rows[chunk.number]

    def _chunks(self, host: HostRows) -> list[_Chunk]:
        """The parts of prompts with pictures in a step."""
        found: list[_Chunk] = []
        if not self._rows:
            return found
        for index, row in enumerate(host.rows.tolist()):
            known = self._rows.get(row)
            if known is not None:
                start, first = int(host.starts[index]), int(host.first_positions[index])
                found.append(_Chunk(index, row, known, start, first, first + int(host.starts[index + 1]) - start))
        return found

    def _positions(self, view: StepView, chunks: Sequence[_Chunk]) -> torch.Tensor:
        positions = view.tensors.positions + view.of_tokens("rope_delta")
        parts: list[Int64Array] = []
        for chunk in chunks:
            if chunk.row.positions is not None and len(own := chunk.row.positions[chunk.first : chunk.end]):
                tokens = np.arange(chunk.start, chunk.start + len(own))
                parts.append(np.concatenate((tokens[:, None], own), axis=1))
        if not parts:
            return positions
        sent = to_device(np.concatenate(parts), self._device)
        return positions[:, None].repeat(1, sent.shape[1] - 1).index_copy(0, sent[:, 0], sent[:, 1:])

    def _show(self, view: StepView, chunks: Sequence[_Chunk]) -> None:
        found = ((chunk, *pair) for chunk in chunks for pair in chunk.wanted())
        wanted = [one for one in found if self._model.encoder_for(one[1].item.kind) is not None]
        if not wanted:
            return
        encoded = self._encoded([shown.item for _, shown, _ in wanted])
        rows = [shown.places[pieces] - chunk.first + chunk.start for chunk, shown, pieces in wanted]
        parts = [encoded[shown.item.digest][:, pieces] for _, shown, pieces in wanted]
        embeddings = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        show(view.layer_inputs, to_device(np.concatenate(rows), self._device), embeddings)

    def _encoded(self, items: Sequence[MediaItem]) -> dict[bytes, torch.Tensor]:
        """Embeddings of items by digest: kept ones, and the others from as few calls of the encoder as may be."""
        found: dict[bytes, torch.Tensor] = {}
        missing: dict[bytes, MediaItem] = {}
        for item in items:
            kept = self._cache.find(item.digest)
            if kept is None:
                missing[item.digest] = item
            else:
                found[item.digest] = kept
        self._figures.add(QUERIES, len(found) + len(missing))
        self._figures.add(HITS, len(found))
        if missing:
            clock = StepClock(self._runtime)
            found |= self._made(list(missing.values()))
            clock.stop()
            self._apart.append(clock)
        return found

    def _made(self, items: Sequence[MediaItem]) -> dict[bytes, torch.Tensor]:
        """Embeddings of new items, which are kept: of several, each rank that has a part of the text encodes some, and
        the ranks' sum is all of them."""
        tp, counts = self._model.tp, [self._encoder_for(item).num_tokens(item.grid) for item in items]
        if tp.size == 1 or len(items) == 1:
            made = self._made_here(items)
        else:
            whole = self._empty(sum(counts))
            parts = whole.split(counts, dim=1)  # type: ignore[no-untyped-call]
            places = dealt(counts, tp.size)[tp.rank]
            own = self._made_here([items[place] for place in places])
            for place in places:
                parts[place].copy_(own[items[place].digest])
            parts = tp.all_reduce(whole).split(counts, dim=1)  # type: ignore[no-untyped-call]
            made = {item.digest: part.clone() for item, part in zip(items, parts, strict=True)}
        for digest, one in made.items():
            self._cache.keep(digest, one, one.nbytes)
        return made

    def _empty(self, num_tokens: int) -> torch.Tensor:
        shape = 1 + self._model.num_deep, num_tokens, self._model.vector_size
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _made_here(self, items: Sequence[MediaItem]) -> dict[bytes, torch.Tensor]:
        """Embeddings of items: those of common sizes are replayed one by one, others encoded together."""
        made: dict[bytes, torch.Tensor] = {}
        others: list[MediaItem] = []
        for item in items:
            own = self._graphs.encode(self._picture(item)) if self._is_recorded(item) else None
            if own is None:
                others.append(item)
            else:
                made[item.digest] = own
        for group in self._groups(others):
            made |= self._encode(group)
        return made

    def _is_recorded(self, item: MediaItem) -> bool:
        return item.kind != "audio" and self._graphs.serves(item.shape, item.grid)

    def after(self, step: SchedulerOutput, results: StepResults) -> None:
        """Tell the encoder's time, which is no token's."""
        if self._apart:
            results.apart, self._apart = (*results.apart, *self._apart), []

    def _groups(self, items: Iterable[MediaItem]) -> list[list[MediaItem]]:
        """Items that one call encodes: no more of them than the memory of calls was measured for."""
        groups: list[list[MediaItem]] = []
        open_groups: dict[MediaEncoder, tuple[list[MediaItem], int]] = {}
        for item in items:
            encoder = self._encoder_for(item)
            count = encoder.num_tokens(item.grid)
            group, room = open_groups.get(encoder, ([], 0))
            if count > room:
                group, room = [], self._limits.max_item_tokens
                groups.append(group)
            group.append(item)
            open_groups[encoder] = group, room - count
        return groups

    def _encoder_for(self, item: MediaItem) -> MediaEncoder:
        encoder = self._model.encoder_for(item.kind)
        assert encoder is not None
        return encoder

    def _encode(self, items: Sequence[MediaItem]) -> dict[bytes, torch.Tensor]:
        """`items` are of one encoder."""
        encoder = self._encoder_for(items[0])
        embeddings = encoder([self._picture(item) for item in items])
        if missing := self._model.num_deep - encoder.num_deep:
            embeddings = F.pad(embeddings, (0, 0, 0, 0, 0, missing))  # sounds add nothing to later layers
        parts = embeddings.split([encoder.num_tokens(item.grid) for item in items], dim=1)
        if len(items) > 1:  # a view would hold its neighbours' memory
            parts = [part.clone() for part in parts]
        return dict(zip((item.digest for item in items), parts, strict=True))

    def _picture(self, item: MediaItem) -> Picture:
        assert item.pixels, f"the pixels of an item at {item.offset} are missing"
        pixels = np.frombuffer(item.pixels, VALUE_TYPES[item.kind]).reshape(item.shape)
        return Picture(to_device(pixels, self._device), item.grid)

    # ---- memory, weights and figures

    @property
    def later_bytes(self) -> int:
        """The cache of what encoders gave, and what an encoder itself keeps."""
        later = sum(encoder.later_bytes for encoder in self._encoders)
        return self._limits.cache_bytes + later if self._encoders else 0

    def run_largest(self) -> None:
        """Encode the largest items there may be, and the smallest, for which attention may take another kernel; attend
        to one behind the longest prompt."""
        sent = self._empty(self._limits.max_item_tokens) if self._encoders and self._model.tp.size > 1 else None
        for encoder in self._encoders:
            _run_sizes(encoder, self._limits.max_item_tokens)
        del sent  # what ranks add up
        self._graphs.start()
        if self._model.seen_both_ways:
            layers = [layer for layer in self._model.modules() if isinstance(layer, PictureAttention)]
            widest = max(layers, key=lambda layer: layer.sliding_window is None)
            tokens = min(self._media.whole_tokens, self._limits.context_tokens)
            widest.attend_largest(tokens, self._limits.context_tokens, self._dtype)

    def report_start(self, info: WorkerInfo) -> WorkerInfo:
        """Tokens that the cache holds."""
        if not self._encoders:
            return info
        return replace(info, encoder_tokens=max(1, self._limits.cache_bytes // self._limits.token_bytes))

    def weights_leave(self) -> None:
        """Give the memory back."""
        self._cache.clear()
        self._graphs.release()

    def weights_change(self, whole: bool) -> None:
        """Forget what the weights so far gave."""
        self._cache.clear()
        self._graphs.release()

    def weights_return(self) -> None:
        """Record what a start does."""
        self._graphs.start()

    def report(self, output: ModelRunnerOutput) -> None:
        """Items encoded and found."""
        if self._figures.values:
            output.figures |= self._figures.values
            self._figures = _Figures()


def _run_sizes(encoder: MediaEncoder, most: int) -> None:
    """Encode an item of so many tokens, and the smallest one."""
    largest = encoder.largest(most)
    encoder([largest])
    smallest = encoder.largest(1)
    if smallest.grid != largest.grid:
        encoder([smallest])


def dealt(counts: Sequence[int], size: int) -> list[list[int]]:
    """Places of items of so many tokens dealt out to ranks, the largest first, each to who has least."""
    hands: list[list[int]] = [[] for _ in range(size)]
    held = [0] * size
    for place in sorted(range(len(counts)), key=lambda place: -counts[place]):
        rank = held.index(min(held))
        hands[rank].append(place)
        held[rank] += counts[place]
    return hands


def create(context: FeatureContext) -> Media | None:
    """The feature, where the model sees and this rank has a use for it."""
    model = context.forward.model
    assert isinstance(model, SeeingModel)
    has_encoder = model.encoder is not None or model.ears is not None
    if model.media is None or not (has_encoder or model.has_axes or model.seen_both_ways):
        return None
    width = model.vector_size * context.forward.dtype.itemsize
    config = context.config
    longest = context.state.token_ids.shape[1]
    limits = EncoderLimits(config.encoder_cache_bytes, config.max_item_tokens, (1 + model.num_deep) * width, longest)
    device = context.state.device
    graphs = create_graphs(config, model.encoder, device, PICTURES)
    return Media(model, context.state.inputs, device, context.forward.dtype, limits, graphs)
