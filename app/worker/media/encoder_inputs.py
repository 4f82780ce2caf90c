"""The feature that encodes what decoders attend to as a whole: once for all requests with the same input, before the
first step of any of them.

Keys and values of an input lie in a slot of every layer that attends to them; which slot a row reads is one line of the
rows' table. There is a slot for every row that the host gives away, so a row always finds one, and what no row reads
stays until its slot is needed: a request that comes back, or asks the same again, finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from app.layers.cross_attention import LENGTHS, SLOTS
from app.models.encoder_decoder import EncoderDecoder
from app.models.multimodal.base import Picture
from app.platforms import platform_of
from app.platforms.to_device import to_device
from app.records.encoder_input import EncoderInput, encoder_input_of
from app.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from app.records.worker_info import WorkerInfo
from app.worker.attention.kv_cache import KVCache
from app.worker.features.context import FeatureContext
from app.worker.lora.slot_table import SlotTable
from app.worker.media.encoder_graphs import NoGraphs
from app.worker.media.media import HITS, QUERIES
from app.worker.media.one_input import GRID, create_graphs
from app.worker.rows.pending_step import StepClock, StepResults
from app.worker.rows.step_inputs import StepInputs, StepView
from app.worker.rows.worker_feature import WorkerFeature

SLOT = "encoded_slot"  # the line that says which slot a row reads


class EncoderInputs(WorkerFeature):
    """Holds the inputs of rows, and which slots lack what is to be read there."""

    def __init__(
        self,
        model: EncoderDecoder,
        inputs: StepInputs,
        cache: KVCache,
        device: torch.device,
        most: int,
        graphs: NoGraphs,
    ) -> None:
        """`most`: inputs that one call of the encoder takes; `graphs`: recordings of calls with one."""
        self._graphs = graphs
        self._encoder, self._layers, self._cache, self._device = model.encoder, model.cross_layers, cache, device
        self._slot = inputs.declare(SLOT, torch.int32)
        self._length = inputs.declare("encoded_length", torch.int32, idle=1)
        self._num_slots, self._most = cache.num_encoded, most
        size, positions = cache.spec.block_size, model.encoder.info.num_positions
        self._slot_tokens = -(-positions // size) * size
        self._table = SlotTable(cache.num_encoded)
        self._rows: dict[int, EncoderInput] = {}
        self._missing: dict[int, EncoderInput] = {}  # what is to be encoded into slots
        self._figures: dict[str, float] = {}
        self._runtime, self._apart = platform_of(device).runtime, tuple[StepClock, ...]()

    # ---- rows

    def leave(self, row: int) -> None:
        """The row was freed."""
        given = self._rows.pop(row, None)
        if given is not None:
            self._table.leave(given.digest)

    def enter(self, row: int, request: NewRequest) -> None:
        """A request entered its row; one of a warm-up has no input, and reads one position of some slot."""
        self.leave(row)
        given, slot = encoder_input_of(request.spec.asks), 0
        if given is not None:
            slot, is_new = self._table.enter(given.digest)
            self._rows[row] = given
            if is_new:
                self._missing[slot] = given
            self._count(QUERIES, 1)
            self._count(HITS, int(not is_new))
        self._slot.set(row, slot)
        self._length.set(row, 1 if given is None else given.length)

    # ---- the step

    def is_ordinary(self, rows: NDArray[np.int64]) -> bool:
        """True where a row's input is not encoded yet."""
        return bool(self._missing) and not self._missing.keys().isdisjoint(self._slot.values[rows].tolist())

    def inputs(self, view: StepView) -> None:
        """Brings slots and lengths int32 [T] of the tokens' requests."""
        if view.host is not None and self._missing:
            wanted = dict.fromkeys(self._slot.values[view.host.rows].tolist())
            missing = {slot: self._missing.pop(slot) for slot in wanted if slot in self._missing}
            if missing:
                clock = StepClock(self._runtime)
                self._encode(missing)
                clock.stop()
                self._apart = (clock,)
        view.layer_inputs[SLOTS] = view.of_tokens(SLOT)
        view.layer_inputs[LENGTHS] = view.of_tokens("encoded_length")

    def _encode(self, missing: Mapping[int, EncoderInput]) -> None:
        items = list(missing.items())
        for first in range(0, len(items), self._most):
            group = items[first : first + self._most]
            values = [to_device(np.array(given.array()), self._device) for _, given in group]
            self._write(values, [slot for slot, _ in group], [given.length for _, given in group])

    def _write(self, values: Sequence[torch.Tensor], slots: Sequence[int], lengths: Sequence[int]) -> None:
        encoded = self._replayed(values)
        encoded = self._encoder(values) if encoded is None else encoded
        mapping = to_device(np.concatenate(list(self._places(slots, lengths))), self._device)
        for layer in self._layers:
            layer.write(encoded, mapping, self._cache.tensors[layer.layer_index])

    def _replayed(self, values: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if len(values) > 1 or not self._graphs.serves(tuple(values[0].shape), GRID):
            return None
        states = self._graphs.encode(Picture(values[0], GRID))
        return None if states is None else states[0]

    def _places(self, slots: Sequence[int], lengths: Sequence[int]) -> Iterator[NDArray[np.int64]]:
        for slot, length in zip(slots, lengths, strict=True):
            yield np.arange(length, dtype=np.int64) + slot * self._slot_tokens

    def after(self, step: SchedulerOutput, results: StepResults) -> None:
        """Tell the encoder's time, which is no token's."""
        if self._apart:
            results.apart, self._apart = (*results.apart, *self._apart), ()

    # ---- memory, weights and figures

    def run_largest(self) -> None:
        """Encode as much as one call may."""
        count = min(self._most, self._num_slots)
        positions = self._encoder.info.num_positions
        self._write([self._encoder.largest()] * count, range(count), [positions] * count)
        self._graphs.start()

    def connect(self, kv_caches: list[torch.Tensor]) -> None:
        """The slots may have lost what they held."""
        self._forget()

    def weights_leave(self) -> None:
        """Give the memory back."""
        self._graphs.release()

    def weights_change(self, whole: bool) -> None:
        """Forget what the weights so far gave."""
        self._forget()
        self._graphs.release()

    def weights_return(self) -> None:
        """Record what a start does."""
        self._graphs.start()

    def _forget(self) -> None:
        resident = self._table.resident
        for digest in resident:
            self._table.drop(digest)
        self._missing = {resident[given.digest]: given for given in self._rows.values()}

    def report_start(self, info: WorkerInfo) -> WorkerInfo:
        """Slots, and the positions that they hold."""
        positions = self._num_slots * self._encoder.info.num_positions
        return replace(info, encoder_tokens=positions, most_rows=self._num_slots)

    def report(self, output: ModelRunnerOutput) -> None:
        """Inputs that came, and those that had been encoded."""
        if self._figures:
            output.figures |= self._figures
            self._figures = {}

    def _count(self, name: str, count: int) -> None:
        self._figures[name] = self._figures.get(name, 0) + count


def create(context: FeatureContext) -> EncoderInputs:
    """The feature of a model whose decoder attends to an encoder."""
    model, state = context.forward.model, context.state
    assert isinstance(model, EncoderDecoder)
    most = max(1, context.config.max_num_batched_tokens // model.encoder.info.num_positions)
    graphs = create_graphs(context.config, model.encoder, state.device)
    return EncoderInputs(model, state.inputs, context.forward.cache, state.device, most, graphs)
