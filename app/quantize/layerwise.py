"""Runs texts through a checkpoint one decoder layer at a time: each layer is loaded as a pipeline stage of its own, has
all texts run through it, and makes room for the next. What it caches can be looked at meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.distributed.stage_link import StageLink
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.loading.loader import load_model
from app.models.base import EngineModel
from app.quantization import select_quantization
from app.quantize.token_batch import BLOCK_SIZE, TokenBatch
from app.worker.attention.backend import select_attention
from app.worker.attention.kv_cache import KVCache, KVCacheSpec, select_kv_dtype
from app.worker.device import enter_thread, num_threads, select_device, select_dtype
from app.worker.forward_pass import ForwardPass


@dataclass(slots=True, frozen=True)
class LoadedLayer:
    """One decoder layer in memory, with the embedding before the first, norm and head after the last."""

    index: int
    model: EngineModel
    forward: ForwardPass
    dtype: torch.dtype

    @property
    def caches(self) -> list[torch.Tensor]:
        """The KV cache of each of its attention layers, with the last batch in it."""
        return self.forward.cache.tensors

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] after the last layer -> fp32 [N, V]."""
        return self.forward.logits(hidden)


class LayerObserver:
    """Is told what happens in a layer."""

    def begin(self, layer: LoadedLayer) -> None:
        """The layer is about to run."""

    def after_batch(self, layer: LoadedLayer) -> None:
        """A batch went through, and is in the layer's caches."""

    def end(self, layer: LoadedLayer) -> None:
        """All batches went through."""


@dataclass(slots=True, frozen=True)
class FinalStates:
    """Holds what came out of the last layer."""

    hidden: Sequence[torch.Tensor]  # [T, C] of each batch, on the host
    last: LoadedLayer


@dataclass(slots=True)
class LayerwiseModel:
    """A model directory, and where its layers run. ConfigError where they cannot there."""

    directory: str
    device_name: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None  # of plain weights, while they are loaded
    info: ModelInfo = field(init=False)
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        config = EngineConfig(model=self.directory, device=self.device_name)
        self.info = ModelInfo.of(config)
        self.device, _ = select_device(config.device, 0)
        self.dtype, _ = select_dtype("auto", self.device, self.info)
        enter_thread(self.device, num_threads(config))

    def load(self, index: int, num_blocks: int) -> LoadedLayer:
        """One layer, and memory for its cache. CheckpointError."""
        ctx = self._context(index)
        model = load_model(self.info, ctx, "auto", 0)
        cache = KVCache(KVCacheSpec.of(model.attention_layers, BLOCK_SIZE), self.device)
        cache.allocate(num_blocks)
        link = StageLink(ParallelGroups(), self.info.hidden_size, self.dtype, self.device, 1)
        return LoadedLayer(index, model, ForwardPass(model, cache, link, self.info.vocab_size, self.dtype), self.dtype)

    @torch.inference_mode()
    def run(self, batches: Sequence[TokenBatch], observers: Sequence[LayerObserver] = ()) -> FinalStates:
        """All layers, one after another."""
        hidden: list[torch.Tensor | None] = [None] * len(batches)
        num_blocks, layer = max(batch.num_blocks for batch in batches), None
        for index in tqdm(range(self.info.num_layers), desc="layers", leave=False, disable=None):
            layer = None
            gc.collect()  # parameters know their layers, which know them
            layer = self.load(index, num_blocks)
            _refuse_states(layer)
            for observer in observers:
                observer.begin(layer)
            for number, batch in enumerate(batches):
                hidden[number] = self._run_batch(layer, batch, hidden[number])
                for observer in observers:
                    observer.after_batch(layer)
            for observer in observers:
                observer.end(layer)
        assert layer is not None
        return FinalStates([states for states in hidden if states is not None], layer)

    def _run_batch(self, layer: LoadedLayer, batch: TokenBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        received = None if hidden is None else hidden.to(self.device)
        tokens, positions = (x.to(self.device) for x in (batch.input_ids, batch.positions))
        ctx = layer.forward.context(positions, batch.metadata(self.device), received)
        return layer.forward.compute(tokens, ctx).last.cpu()

    def _context(self, index: int) -> BuildContext:
        stage = RankGroup.unconnected(index, self.info.num_layers)
        quantization, _ = select_quantization(self.quantization, self.info.quantization_scheme, self.device, self.dtype)
        return BuildContext(
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.info.max_position_embeddings,
            attention_ops=select_attention("auto", self.device)[0],
            groups=ParallelGroups(pp=stage),
            stage_layers=range(index, index + 1),
            quantization=quantization,
            kv_dtype=select_kv_dtype(self.kv_cache_dtype, self.device),
        )


def _refuse_states(layer: LoadedLayer) -> None:
    if layer.forward.cache.spec.states:
        raise UnsupportedError(
            f"layer {layer.index} keeps states of requests, through which no texts go: quantize without",
            param="model",
        )
