"""Self-attention of decoders whose prompts are computed whole, each in one step: nothing is cached.

As of encoders, one kernel reads the texts where they lie; keys and values of a step's tokens are kept for one layer.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from app.errors import UnsupportedError
from app.kernels.attention import AttentionMetadata
from app.kernels.attention.encoder import EncoderPlan, plan_encoder
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.rotary import RotaryEmbedding


class OnePassAttention(Attention):
    """Grouped-query attention to the tokens of the same step."""

    def __init__(
        self, ctx: BuildContext, settings: AttentionSettings, layer_index: int, rotary: RotaryEmbedding
    ) -> None:
        super().__init__(ctx, settings, layer_index, rotary)
        if self.soft_cap is not None or self.slopes is not None or self.sinks is not None:
            raise UnsupportedError("attention without a cache has no soft caps, ALiBi and sinks", param="model")
        self.is_capturable = self.captures_prompts = self.shares_prefixes = False

    @property
    def plan_key(self) -> Hashable:
        """See EncoderAttention."""
        return EncoderPlan

    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """See EncoderAttention."""
        assert meta.host_starts is not None, "such a step is not over static tensors"
        meta.plan = plan_encoder(meta.host_starts.tolist(), meta.seq_lens.device)

    def cache_spec(self) -> None:
        """See EncoderAttention."""
        return

    def kept(self, heads: torch.Tensor, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for the step's keys and values, a block for each token, which all layers write in turn; and slots."""
        key = (OnePassAttention, self.num_kv_heads, self.head_dim)
        found: tuple[torch.Tensor, torch.Tensor] | None = ctx.memo.get(key)
        if found is None:
            count = len(heads)
            room = torch.empty(count, 2, self.num_kv_heads, 1, self.head_dim, dtype=heads.dtype, device=heads.device)
            ctx.memo[key] = found = room, torch.arange(count, dtype=torch.int64, device=heads.device)
        return found

    def attend(self, query: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """query [T, Hq, D] over the keys before each -> [T, Hq, D]."""
        plan = ctx.attention[self.layer_index].plan
        assert isinstance(plan, EncoderPlan)
        key, value = self.kept(query, ctx)[0].squeeze(3).unbind(1)
        return plan.attend(query, key, value, self.scale, self.sliding_window, is_causal=True)
