"""Plans, tensors and what may be captured follow from every layer of a model, not from its first one."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch

from app.distributed.parallel_groups import ParallelGroups
from app.distributed.stage_link import StageLink
from app.kernels.attention import AttentionMetadata
from app.layers.attention_layer import AttentionLayer
from app.layers.cache_spec import LayerCacheSpec
from app.layers.context import ForwardContext
from app.models.base import EngineModel
from app.worker.attention.kv_cache import KVCache, KVCacheSpec
from app.worker.forward_pass import ForwardPass

CPU = torch.device("cpu")


class Layer(AttentionLayer):
    def __init__(self, index: int, width: int, is_capturable: bool) -> None:
        super().__init__()
        self.layer_index, self.width, self.is_capturable = index, width, is_capturable

    @property
    def plan_key(self) -> Hashable:
        return self.width

    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        assert meta.plan is None
        meta.plan = (self.width, block_size)

    def cache_spec(self) -> LayerCacheSpec:
        return LayerCacheSpec((), self.width, torch.float32)


class Model(EngineModel):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.seen: list[tuple[object, torch.Size]] = []

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        self.seen = [(meta.plan, cache.shape) for meta, cache in zip(ctx.attention, ctx.kv_caches, strict=True)]
        return input_ids.float().unsqueeze(1)


def forward_pass(*layers: Layer) -> tuple[ForwardPass, Model]:
    model = Model(*layers)
    cache = KVCache(KVCacheSpec.of(model.attention_layers, 4), CPU)
    cache.allocate(3)
    return ForwardPass(model, cache, StageLink(ParallelGroups(), 0, torch.float32, CPU, 0), 10, torch.float32), model


def test_layers_that_plan_alike_share_a_plan_and_each_has_its_own_cache() -> None:
    forward, model = forward_pass(Layer(0, 6, True), Layer(1, 8, True), Layer(2, 6, True))
    tensor = torch.zeros(1, dtype=torch.int32)
    meta = AttentionMetadata(tensor, tensor, tensor, tensor.long(), 1, 1, 1, host_starts=np.array([0, 1]))
    forward.run(tensor, forward.context(tensor.long(), meta))
    assert model.seen == [((6, 4), (3, 4, 6)), ((8, 4), (3, 4, 8)), ((6, 4), (3, 4, 6))]
    assert forward.cache.spec.bytes_per_block == 4 * (6 + 8 + 6) * 4


def test_one_layer_that_cannot_be_captured_is_enough() -> None:
    assert forward_pass(Layer(0, 6, True), Layer(1, 8, True))[0].is_capturable
    assert not forward_pass(Layer(0, 6, True), Layer(1, 8, False))[0].is_capturable
