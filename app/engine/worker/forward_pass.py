"""One rank's part of the model over its KV cache: from token ids to hidden states, and on to logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from app.engine.attention.kv_cache import KVCache
from app.engine.distributed.stage_link import StageLink
from app.engine.layers.context import ForwardContext
from app.engine.models.base import EngineModel
from app.kernels.attention import AttentionMetadata


class ForwardPass:
    """Computes steps. Between pipeline stages, `run` takes hidden states in and sends them on."""

    def __init__(
        self, model: EngineModel, cache: KVCache, link: StageLink, vocab_size: int, dtype: torch.dtype
    ) -> None:
        self.cache = cache
        self.link = link
        self.vocab_size = vocab_size
        self.dtype = dtype  # the type of hidden states and logits
        self.model = model
        layers = model.attention_layers
        keys = [(group, layer.plan_key) for group, layer in zip(cache.spec.groups_of(layers), layers, strict=True)]
        planned = dict(zip(reversed(keys), reversed(layers), strict=True))  # a layer of those that plan alike
        self._planned = list(planned.values())
        self._groups = [group for group, _ in planned]  # of each of them
        self._plan_of = [list(planned).index(key) for key in keys]

    @property
    def is_capturable(self) -> bool:
        """Whether a decode step may be captured and replayed with other inputs."""
        return all(layer.is_capturable for layer in self._planned)

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionMetadata,
        layer_inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`compute`, between what comes from the stage before and what goes to the next one."""
        received = self.link.receive_hidden(len(positions))
        hidden = self.compute(input_ids, positions, attention, received, layer_inputs)
        self.link.send_hidden(hidden)
        return hidden

    def compute(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionMetadata,
        received: torch.Tensor | None,
        layer_inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """int [T], or hidden states [T, C] of the stage before -> hidden states [T, C]; the tokens' keys and values go
        into the cache."""
        ctx = ForwardContext(positions, self._plan(attention), self.cache.tensors, received, layer_inputs or {})
        hidden: torch.Tensor = self.model(input_ids, ctx)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> fp32 [N, V]; in the last stage."""
        return self.model.raw_logits(hidden).float()

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> [N, V] in the model's type; in the last stage."""
        return self.model.raw_logits(hidden)

    def _plan(self, attention: AttentionMetadata) -> list[AttentionMetadata]:
        """The plan of each attention layer; one object for all where all plan alike."""
        if attention.more_tables:
            windows = self.cache.spec.windows
            metas = [attention.of_group(group, sees_all=windows[group] is None) for group in self._groups]
        else:
            metas = [attention, *(replace(attention) for _ in self._planned[1:])]
        for layer, meta in zip(self._planned, metas, strict=True):
            layer.plan(meta, self.cache.spec.block_size)
        return [metas[index] for index in self._plan_of]
