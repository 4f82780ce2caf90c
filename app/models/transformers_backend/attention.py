"""transformers' attention interface over the paged KV cache.

An attention module of transformers projects and rotates, then calls the function that its configuration names with
queries, keys and values of the step. Ours finds the `PagedAttention` that stands in the module, which writes keys and
values into the cache and attends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from app.kernels.attention import AttentionMetadata, HeadBias
from app.kernels.fused import FUSED_OPS
from app.layers.attention_layer import KVAttentionLayer
from app.layers.context import BuildContext, ForwardContext
from app.models.transformers_backend.rotary import angles, exchange_rotation
from app.models.transformers_backend.tracing import AttentionCall

IMPLEMENTATION = "manta"  # without a mask of its own: transformers then makes none
PLACE = "paged_attention"  # the attribute of an attention module that holds ours


class Step:
    """The step that runs now; transformers' modules do not pass it on."""

    context: ForwardContext | None = None


class PagedAttention(KVAttentionLayer):
    """Stands in the place of an attention call of a module."""

    def __init__(
        self,
        ctx: BuildContext,
        call: AttentionCall,
        whole: AttentionCall,
        step: Step,
        *,
        layer_index: int,
        is_capturable: bool,
    ) -> None:
        """`call`: of this rank's heads; `whole`: of the model's."""
        super().__init__()
        self.num_heads, self.num_kv_heads = call.num_heads, call.num_kv_heads
        self.whole_kv_heads = whole.num_kv_heads
        self.first_kv_head = 0 if call.num_kv_heads == whole.num_kv_heads else ctx.groups.tp.rank * call.num_kv_heads
        # The cache has one width for keys and values: the narrower of them are padded with zeros, which add nothing.
        self.head_dim, self.value_dim = max(call.head_dim, call.value_dim), call.value_dim
        self.scale = call.head_dim**-0.5 if call.scale is None else call.scale
        self.soft_cap, self.sliding_window = call.soft_cap, call.sliding_window
        self.layer_index = layer_index
        self.step = step
        self.choose_cache(
            ctx,
            sliding_window=call.sliding_window is not None,
            soft_cap=call.soft_cap is not None,
            sinks=call.has_sinks,
        )
        self.is_capturable = self.captures_prompts = self.ops.is_capturable and is_capturable
        self.shares_prefixes = self.ops.shares_prefixes
        self.fused = ctx.kernels(FUSED_OPS)
        self.rotation = exchange_rotation(call.module)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv], sinks [Hq] -> [1, T, Hq, Dv]."""
        rotation = None if self.rotation is None else self.rotation.take(query, key, value)
        if query.is_meta:  # a trace
            return query.new_empty(1, query.shape[2], self.num_heads, self.value_dim)
        ctx = self.step.context
        assert ctx is not None, "called outside of a step"
        kv_cache, meta = ctx.kv_caches[self.layer_index], ctx.attention[self.layer_index]
        if rotation is not None:
            heads, cos, sin = rotation
            cos, sin = angles(ctx, cos, sin)
            rows = self.fused.rotate_and_write(heads, cos, sin, None, kv_cache, meta.slot_mapping, self.kv_scales)
            return self._attend(rows, kv_cache, meta, sinks)
        self.ops.write_kv(self._rows(key), self._rows(value), kv_cache, meta.slot_mapping, self.kv_scales)
        return self._attend(self._rows(query), kv_cache, meta, sinks)

    def _attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMetadata, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """query [T, Hq, D] over the cache -> [1, T, Hq, Dv]."""
        more = {} if sinks is None else {"bias": HeadBias(sinks=sinks.float())}
        out = self.ops.paged_attention(
            query,
            kv_cache,
            meta,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            kv_scales=self.kv_scales,
            **more,
        )
        return out[None] if self.value_dim == self.head_dim else out[None, ..., : self.value_dim]

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """[1, H, T, D] -> [T, H, D] of the cache's width, the vectors of heads contiguous as the kernels want them."""
        rows = x[0].transpose(0, 1)
        if rows.shape[-1] < self.head_dim:
            return F.pad(rows, (0, self.head_dim - rows.shape[-1]))
        return rows if rows.stride(-1) == 1 else rows.contiguous()


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    """The attention function: what it is told beside the tensors, the trace has seen already."""
    return getattr(module, PLACE)(query, key, value, more.get("s_aux")), None


AttentionInterface.register(IMPLEMENTATION, _attend)
