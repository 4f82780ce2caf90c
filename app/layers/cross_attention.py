"""Attention of a decoder's tokens to an encoder's output (Vaswani et al., 2017), whose keys and values are computed
once for a request.

They lie in blocks that are the layer's alone: a request has a slot, a run of blocks. Every token sees all of them, so a
step is decodes alone, a request for each token: the paged kernels serve it as they are.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from app.kernels.attention import ENCODED_TOKENS, AttentionMetadata, EncodedStep
from app.kernels.attention.reference import readable
from app.kernels.gemm import Activations
from app.layers.attention import AttentionSettings
from app.layers.attention_layer import KVAttentionLayer
from app.layers.cache_spec import LayerCacheSpec
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.linear import ColumnLinear, MergedColumnLinear, RowLinear

SLOTS, LENGTHS = "encoded_slots", "encoded_lengths"  # among what features bring, int32 [T] each
# Likewise, each followed by the layer's number: which queries of which heads are asked for, as token * heads + head,
# int64 [n], and where the layer is to leave them, [n, D].
ASKED, LEFT = "asked_queries.", "left_queries."


class EncodedLinear(MergedColumnLinear):
    """Keys and values of an encoder's output, which requests share: none has an adapter's product in them."""

    takes_delta = False


class CrossAttention(KVAttentionLayer):
    """Reads the settings of a decoder's attention. `num_positions`: most of an encoder's output."""

    sliding_window = None

    def __init__(self, ctx: BuildContext, settings: AttentionSettings, layer_index: int, num_positions: int) -> None:
        super().__init__()
        s, width = settings, settings.num_heads * settings.head_dim
        self.q_proj = ColumnLinear(ctx, s.hidden_size, width, s.qkv_bias)
        self.kv_proj = EncodedLinear(ctx, s.hidden_size, {"k_proj": width, "v_proj": width}, s.qkv_bias)
        self.o_proj = RowLinear(ctx, width, s.hidden_size, s.output_bias)
        self.num_heads = self.num_kv_heads = ctx.groups.tp.share_of(s.num_heads, "num_attention_heads")
        self.first_kv_head, self.whole_kv_heads = ctx.groups.tp.rank * self.num_heads, s.num_heads
        self.head_dim, self.scale = s.head_dim, s.head_dim**-0.5 if s.scale is None else s.scale
        self.layer_index, self.num_positions, self.tp = layer_index, num_positions, ctx.groups.tp
        self.choose_cache(ctx)
        self.is_capturable = self.ops.is_capturable
        # Not in fp32: its sums would be cut otherwise in steps with fewer tokens (I6).
        is_plain = self.kv_scales is None and self.kv_dtype == ctx.dtype != torch.float32
        self._attend_encoded = self.ops.encoded(self.head_dim, num_positions) if is_plain else None

    @property
    def plan_key(self) -> Hashable:
        """The cross attentions of a model, which plan apart from those that cache tokens."""
        return CrossAttention, super().plan_key

    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """Nothing: which slots a step reads is known only with what features bring."""

    def cache_spec(self) -> LayerCacheSpec:
        """Keys and values of an encoder's output."""
        return replace(self.kv_spec(), encoder_positions=self.num_positions)

    def write(self, encoded: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor) -> None:
        """Put keys and values of an encoder's output [n, C] where `slot_mapping` int64 [n] says, in the layer's own
        cache."""
        key, value = self.kv_proj(encoded).view(len(encoded), 2, self.num_heads, self.head_dim).unbind(1)
        self.ops.write_kv(key, value, cache, slot_mapping, kv_scales=self.kv_scales)

    def weights(self, query: torch.Tensor, head: int, slot: int, cache: torch.Tensor) -> torch.Tensor:
        """Returns how much queries [n, D] of one of this rank's heads attend to each position of what lies in a slot,
        fp32 [n, num_positions]."""
        each = -(-self.num_positions // cache.shape[-2])
        stored = cache[slot * each : (slot + 1) * each, 0, head].flatten(0, 1)[: self.num_positions]
        key = readable(stored, torch.float32)
        if self.kv_scales is not None:
            key = key * self.kv_scales[0, head]
        return (query.float() @ key.T * self.scale).softmax(-1)

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        query = self.q_proj(x)
        query = query.view(len(query), self.num_heads, self.head_dim)
        left = ctx.inputs.get(f"{LEFT}{self.layer_index}")
        if left is not None:
            torch.index_select(query.flatten(0, 1), 0, ctx.inputs[f"{ASKED}{self.layer_index}"], out=left)
        out = self._attend(query, ctx)
        return self.o_proj(out.reshape(len(out), -1), epilogue)  # type: ignore[no-any-return]

    def _attend(self, query: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        cache = ctx.kv_caches[self.layer_index]
        if self._attend_encoded is not None and len(query) <= ENCODED_TOKENS:
            return self._attend_encoded(query, cache, self._encoded_step(ctx), self.scale)
        return self.ops.paged_attention(
            query, cache, self._step(ctx, cache), scale=self.scale, kv_scales=self.kv_scales
        )

    def _encoded_step(self, ctx: ForwardContext) -> EncodedStep:
        key = CrossAttention, self.num_heads, self.head_dim, self.num_positions
        found: EncodedStep | None = ctx.memo.get(key)
        if found is None:
            slots, lengths = self._slots(ctx)
            found = ctx.memo[key] = EncodedStep(slots, lengths, self.num_positions)
        return found

    def _slots(self, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        slots, lengths = ctx.inputs.get(SLOTS), ctx.inputs.get(LENGTHS)
        if slots is None or lengths is None:  # nobody asked for the step: a warm-up, which reads the first slot
            slots = torch.zeros(len(ctx.positions), dtype=torch.int32, device=ctx.positions.device)
            lengths = torch.full_like(slots, self.num_positions)
        return slots, lengths

    def _step(self, ctx: ForwardContext, cache: torch.Tensor) -> AttentionMetadata:
        """The step as this kind of layer sees it: each token a request that has the whole slot behind it."""
        found: AttentionMetadata | None = ctx.memo.get(self.plan_key)
        if found is None:
            found = ctx.memo[self.plan_key] = self._made(ctx, cache)
        return found

    def _made(self, ctx: ForwardContext, cache: torch.Tensor) -> AttentionMetadata:
        own, num_tokens, block_size = ctx.attention[self.layer_index], len(ctx.positions), cache.shape[-2]
        each = -(-self.num_positions // block_size)
        slots, lengths = self._slots(ctx)
        blocks = torch.arange(each, dtype=torch.int32, device=cache.device)
        made = AttentionMetadata(
            query_start_loc=torch.arange(num_tokens + 1, dtype=torch.int32, device=cache.device),
            seq_lens=lengths,
            block_table=slots[:, None] * each + blocks,
            slot_mapping=own.slot_mapping,
            max_query_len=1,
            max_seq_len=self.num_positions,
            num_decodes=num_tokens,
            is_static=own.is_static,
        )
        super().plan(made, block_size)
        return made
