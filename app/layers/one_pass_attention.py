"""Self-attention of decoders whose prompts are computed whole, each in one step: nothing is cached.

As of encoders, one kernel reads the texts where they lie: queries, keys and values stay in their product.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from app.errors import UnsupportedError
from app.kernels.attention import AttentionMetadata
from app.kernels.attention.encoder import EncoderPlan, plan_encoder
from app.kernels.gemm import Activations
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
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
        meta.plan = plan_encoder(meta.host_starts.tolist(), meta.seq_lens.device, is_causal=True)

    def cache_spec(self) -> None:
        """See EncoderAttention."""
        return

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it. Queries and keys are rotated where their product is."""
        heads, norm, gate = self._projected(x)
        rotation = self.rotary.of_step(ctx)
        turned, value = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], 1)
        self.fused.rotate_heads(turned, rotation.cos, rotation.sin, norm, self.num_heads)
        query, key = turned[:, : self.num_heads], turned[:, self.num_heads :]
        plan = ctx.attention[self.layer_index].plan
        assert isinstance(plan, EncoderPlan)
        query = self._scaled(query, rotation)
        out = plan.attend(query, key, value, self.scale, self.sliding_window, is_causal=True)
        out = out.reshape(len(out), -1)
        if self.gates_output:
            out = self.fused.times_sigmoid(out, gate.reshape(len(out), -1))
        return self.o_proj(out, epilogue)  # type: ignore[no-any-return]
