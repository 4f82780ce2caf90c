"""One rank's part of the model over its KV cache: from token ids to hidden states, and on to logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from app.engine.attention.kv_cache import KVCache
from app.engine.distributed.stage_link import StageLink
from app.engine.layers.context import ForwardContext
from app.engine.models.base import EngineModel
from app.kernels.attention import AttentionMetadata
from app.kernels.attention.encoder import plan_encoder


class ForwardPass:
    """Computes steps. Between pipeline stages, `run` takes hidden states in and sends them on."""

    def __init__(
        self, model: EngineModel, cache: KVCache, link: StageLink, vocab_size: int, dtype: torch.dtype
    ) -> None:
        self.cache = cache
        self.link = link
        self.vocab_size = vocab_size
        self.dtype = dtype  # of hidden states and logits
        self._model = model
        self._attention = next(iter(model.attention_layers), None)

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
        self._prepare(attention)
        ctx = ForwardContext(positions, attention, self.cache.tensors, received, layer_inputs or {})
        hidden: torch.Tensor = self._model(input_ids, ctx)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> fp32 [N, V]; in the last stage."""
        return self._model.raw_logits(hidden).float()

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] -> [N, V] in the model's type; in the last stage."""
        return self._model.raw_logits(hidden)

    def _prepare(self, attention: AttentionMetadata) -> None:
        layer = self._attention
        if layer is None:
            assert attention.host_starts is not None, "an encoder's step is not over static tensors"
            attention.plan = plan_encoder(attention.host_starts.tolist(), attention.seq_lens.device)
            return
        layer.ops.prepare(
            attention,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=self.cache.spec.block_size,
        )
