"""The worker's feature of low-rank adapters: each row may have one of those that the engine has loaded.

An adapter that is loaded lies in host memory, as its slot will have it, and in a slot from when a row needs it until
the slot is needed for another one. A row's slot is an input of the step; steps without such rows have not this part,
and run the graphs, kernels and numbers that they would run without the feature.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.errors import CheckpointError, InvalidRequestError
from app.kernels.lora import LORA_OPS, NO_SLOT
from app.kernels.recurrent import StateStep
from app.layers.adapted_layer import AdaptedLayer
from app.layers.context import HiddenStates
from app.layers.experts.expert_linear import ExpertLinear
from app.layers.linear import Linear
from app.layers.vocab import LMHead, VocabEmbedding
from app.loading.adapters import AdapterReader
from app.models.base import EngineModel
from app.models.decoder import CausalLM
from app.models.pooling_model import PoolingModel
from app.platforms.to_device import to_device
from app.records.adapter import AdapterAsk
from app.records.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from app.worker.features.context import FeatureContext
from app.worker.forward_pass import Chosen
from app.worker.lora.fitting import Fitting
from app.worker.lora.layer_delta import AdapterStep, ExpertDelta, HeadDelta, LayerDelta, TableDelta
from app.worker.lora.slot_pool import HostAdapter, SlotPool
from app.worker.lora.slot_table import SlotTable
from app.worker.rows.step_inputs import StepInputs, StepView
from app.worker.rows.worker_feature import WorkerFeature


class Adapters(WorkerFeature):
    """All adapters of one rank."""

    part = "lora"
    calls = ("check_adapter", "read_adapter", "adapter_is_read", "fit_adapter", "drop_adapter")

    def __init__(
        self, reader: AdapterReader, pool: SlotPool, inputs: StepInputs, max_rank: int, most_bytes: int
    ) -> None:
        self._reader = reader
        self._pool = pool
        self._max_rank, self._most_bytes = max_rank, most_bytes
        self._slots = SlotTable(pool.num_slots)
        self._slot_of_row = inputs.declare("adapter_slot", torch.int32, idle=NO_SLOT)
        # The same where states go through a step's tokens behind it, when the host may know of other rows already.
        self._slots_there = torch.full((len(self._slot_of_row.values),), NO_SLOT, dtype=torch.int32, device=pool.device)
        self._of_row: dict[int, bytes] = {}
        self._loaded: dict[bytes, HostAdapter] = {}
        self._reading: dict[bytes, Future[HostAdapter]] = {}  # on their way there
        self._sizes: dict[bytes, int] = {}  # of both, in bytes
        self._began: dict[bytes, float] = {}  # when the reading did
        self._checked: tuple[str, AdapterFiles, int] | None = None  # the last one
        self._threads = ThreadPoolExecutor(1, "adapters")
        self._step, self._fitting = AdapterStep(), Fitting(pool)
        self._token_slots: torch.Tensor | None = None  # of the step that is being computed
        self._is_static = False
        self._weights_changed = False
        self._figures: defaultdict[str, float] = defaultdict(float)  # since the last report
        device = self._device = pool.device
        self._ops = LORA_OPS.on(device)
        for layer in pool.layers:
            if isinstance(layer, ExpertLinear):
                layer.pair_delta = ExpertDelta(pool.expert_matrices(layer), self._ops, self._step)
            else:
                layer.delta = _delta_of(layer)(pool.matrices(layer), self._ops, self._step)

    # ---- calls between steps

    def check_adapter(self, directory: str) -> AdapterFiles:
        """The files of an adapter, of which the headers alone were read. CheckpointError, UnsupportedError and
        InvalidRequestError name what is wrong with it."""
        files = AdapterFiles.read(directory, self._max_rank)
        size = self._pool.host_bytes(files.rank, self._reader.check(files))
        self._checked = directory, files, size
        return files

    def _just_checked(self, directory: str) -> tuple[AdapterFiles, int]:
        """The files, and the memory of the host that the adapter will take. Checked once, as that keeps steps waiting:
        what has changed since then has another digest."""
        if self._checked is None or self._checked[0] != directory:
            self.check_adapter(directory)
        assert self._checked is not None
        _, files, size = self._checked
        self._checked = None
        return files, size

    def read_adapter(self, directory: str, digest: bytes) -> None:
        """Begin to take an adapter into host memory, beside the steps; errors of `check_adapter`."""
        if digest in self._loaded or digest in self._reading:
            return
        files, size = self._just_checked(directory)
        self._check_memory(size)
        self._reading[digest] = self._threads.submit(self._read, files, digest)
        self._sizes[digest] = size
        self._began[digest] = time.monotonic()

    def _check_memory(self, own: int) -> None:
        taken, most = sum(self._sizes.values()), self._most_bytes
        if most and taken + own > most:
            what = f"it takes {own:,} bytes, and those that are loaded {taken:,}: unload one"
            raise InvalidRequestError(f"lora_path: lora_host_memory_bytes={most:,}: {what}", param="lora_path")

    def adapter_is_read(self, digest: bytes) -> bool:
        """True if rows may have the adapter. CheckpointError names what its numbers lack."""
        found = self._reading.get(digest)
        if found is not None and found.done():
            del self._reading[digest]
            self._loaded[digest] = found.result()
            self._figures["adapter_reads"] += 1
            self._figures["adapter_read_seconds"] += time.monotonic() - self._began.pop(digest, time.monotonic())
        return digest in self._loaded

    def fit_adapter(self, digest: bytes) -> None:
        """Work out what an adapter that was read is beside the base model's weights. Collective. CheckpointError: it is
        for other ones."""
        with torch.inference_mode():
            self._fitting.fit(self._loaded[digest])

    def drop_adapter(self, digest: bytes) -> None:
        """Forget an adapter that no request has; of rows whose end the next step message tells, one may."""
        self._reading.pop(digest, None)
        self._sizes.pop(digest, None)
        self._began.pop(digest, None)
        self._slots.drop(digest)
        self._loaded.pop(digest, None)

    def close(self) -> None:
        """See WorkerFeature."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, files: AdapterFiles, digest: bytes) -> HostAdapter:
        """Runs in a thread."""
        content = files.content()
        if files.digest_of([memoryview(content)]) != digest:
            raise CheckpointError(f"{files.directory} holds another adapter than a moment ago", param="lora_path")
        with torch.inference_mode():
            pairs, held = self._reader.pairs(files, content), self._reader.changes(files, content)
            return self._pool.on_host(pairs, held, files.rank)

    # ---- rows

    def before(self, step: SchedulerOutput) -> None:
        """Rows leave their adapters before others take theirs: a slot may be given away within one message."""
        self._step.rows = self._step.slots = self._token_slots = None
        for row in [*step.freed_rows, *(request.row for request in step.new_requests)]:
            self._leave(row)
        for request in step.new_requests:
            self._take(request)
        if step.new_requests:
            rows = np.array([request.row for request in step.new_requests], np.int64)
            taken = to_device(np.stack((rows, self._slot_of_row.values[rows])), self._device)
            self._slots_there.index_copy_(0, taken[0], taken[1].int())

    def _leave(self, row: int) -> None:
        digest = self._of_row.pop(row, None)
        if digest is not None:
            self._slots.leave(digest)

    def _take(self, request: NewRequest) -> None:
        ask = request.spec.asked(AdapterAsk)
        slot = NO_SLOT
        if ask is not None:
            assert ask.digest in self._loaded, f"the adapter {ask.name!r} is not loaded"
            slot, is_new = self._slots.enter(ask.digest)
            self._of_row[request.row] = ask.digest
            if is_new:
                self._pool.fill(slot, self._loaded[ask.digest])
                self._figures["adapter_slot_loads"] += 1
        self._slot_of_row.set(request.row, slot)

    # ---- the step

    def takes_part(self, rows: NDArray[np.int64]) -> bool:
        """True if one of the rows has an adapter."""
        return bool((self._slot_of_row.values[rows] != NO_SLOT).any())

    def inputs(self, view: StepView) -> None:
        """Sort the step's tokens by their adapters."""
        self._token_slots, self._is_static = view.of_tokens("adapter_slot"), view.host is None
        self._step.rows, self._step.slots = self._pool.sorted(self._ops, self._token_slots), self._token_slots

    def reads_all(self, rows: NDArray[np.int64]) -> bool:
        """False: of the hidden states it reads none."""
        return False

    def hidden(self, view: StepView, hidden: HiddenStates) -> None:
        """The layers are done; a proposer's own have no adapters."""
        self._step.rows = self._step.slots = None

    @contextmanager
    def within_logits(self, chosen: Chosen) -> Iterator[None]:
        """The head is given these tokens of the step."""
        slots = self._token_slots
        if self._is_static:
            self._token_slots = None  # the next step that is captured may have no adapters
        if slots is not None:
            self._step.head_rows = self._pool.sorted(self._ops, slots if chosen is None else slots[chosen])
        yield
        self._step.head_rows = None

    @contextmanager
    def within_states(self, accepted: StateStep) -> Iterator[None]:
        """States go through some of a step's tokens once more, and products on the way are made of these."""
        rows = accepted.slots.index_select(0, accepted.row_of_token)
        slots = torch.where(rows < 0, NO_SLOT, self._slots_there.index_select(0, rows.clamp(min=0)))
        self._step.rows, self._step.slots = self._pool.sorted(self._ops, slots), slots
        yield
        self._step.rows = self._step.slots = None

    @contextmanager
    def within_classes(self, rows: Sequence[int]) -> Iterator[None]:
        """A classifier is given something of each of these rows."""
        slots = torch.from_numpy(self._slot_of_row.values[list(rows)])
        if bool((slots != NO_SLOT).any()):
            self._step.head_rows = self._pool.sorted(self._ops, slots.to(self._device))
        yield
        self._step.head_rows = None

    @contextmanager
    def stand_in(self, num_tokens: int) -> Iterator[None]:
        """See WorkerFeature: all tokens have the adapter in slot 0."""
        slots = torch.zeros(num_tokens, dtype=torch.int32, device=self._device)
        self._token_slots, self._is_static = slots, False
        self._step.rows, self._step.slots = self._pool.sorted(self._ops, slots), slots
        yield
        self._step.rows = self._step.slots = self._token_slots = None

    # ---- figures and memory

    def report(self, output: ModelRunnerOutput) -> None:
        """See WorkerFeature."""
        if self._figures:
            output.figures |= self._figures
            self._figures.clear()

    def weights_leave(self) -> None:
        """The slots sleep with the weights."""
        self._pool.free()

    def weights_change(self, whole: bool) -> None:
        """Adapters are fitted to the weights again once these are there."""
        self._weights_changed = True

    def weights_return(self) -> None:
        """Rows that stand still find their adapters again."""
        is_stale, self._weights_changed = self._weights_changed, False
        if is_stale:
            self._fitting.forget()
            for digest in sorted(self._loaded):  # in the same order on all ranks
                self.fit_adapter(digest)
        if self._pool.restore() or is_stale:
            for digest, slot in self._slots.resident.items():
                if digest in self._loaded:  # else its rows are done
                    self._pool.fill(slot, self._loaded[digest])


def create(context: FeatureContext) -> Adapters | None:
    """The feature, where adapters are enabled."""
    config, model = context.config, context.forward.model
    if not config.enable_lora:
        return None
    extras, elsewhere = config.lora_extras, context.elsewhere()
    if isinstance(model, CausalLM) and model.tied and model.lm_head is None:
        elsewhere |= {"lm_head.weight"}  # the last stage's, which no tensor fills
    layers = _layers(model, extras=extras, experts=config.lora_experts)
    device, dtype = context.state.device, context.forward.dtype
    made = Adapters(
        AdapterReader(model, layers, elsewhere, extras=extras),
        SlotPool(layers, config.max_loras, config.max_lora_rank, dtype, device, extras=extras),
        context.state.inputs,
        config.max_lora_rank,
        config.lora_host_memory_bytes,
    )
    context.forward.within_states = made.within_states
    if extras:
        context.forward.within_logits = made.within_logits
        context.forward.within_classes = made.within_classes
    return made


def _layers(model: EngineModel, *, extras: bool, experts: bool) -> list[AdaptedLayer]:
    """Those that have room for adapters."""
    kinds: tuple[type[AdaptedLayer], ...] = (Linear,)
    if extras:
        kinds = (Linear, VocabEmbedding) if isinstance(model, PoolingModel) else (Linear, VocabEmbedding, LMHead)
    layers = [module for module in model.modules() if isinstance(module, kinds) and module.takes_delta]
    if extras and isinstance(model, PoolingModel):
        layers += model.head_layers
    if experts:
        layers += [module for module in model.modules() if isinstance(module, ExpertLinear)]
    return layers


def _delta_of(layer: AdaptedLayer) -> type[LayerDelta]:
    if isinstance(layer, VocabEmbedding):
        return TableDelta
    return LayerDelta if isinstance(layer, Linear) else HeadDelta
