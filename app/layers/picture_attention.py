"""Attention of a decoder whose tokens of a picture see each other, those behind them too."""

from __future__ import annotations

import torch

from app.kernels.attention.both_ways import PictureSpan, attend_both_ways
from app.layers.attention import Attention
from app.layers.context import ForwardContext

_BLOCK_SIZE = 16
SPANS = "picture_spans"  # int64 [m, 5] on the host, among what features bring: the fields of each PictureSpan


class PictureAttention(Attention):
    """Differs from Attention in steps that show something."""

    def attend(self, query: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See Attention."""
        out = super().attend(query, ctx)
        spans = ctx.inputs.get(SPANS)
        if spans is None:
            return out
        kv_cache, meta = ctx.kv_caches[self.layer_index], ctx.attention[self.layer_index]
        for span in (PictureSpan(*fields) for fields in spans.tolist()):
            out[span.tokens] = attend_both_ways(
                query[span.tokens],
                kv_cache,
                meta.block_table[span.request],
                span,
                self.scale,
                self.sliding_window,
                self.kv_scales,
            )
        return out

    def attend_largest(self, num_tokens: int, context: int, dtype: torch.dtype) -> None:
        """Attend as a picture of so many tokens at the end of the longest prompt does; nothing comes of it."""
        device = self.qkv_proj.device
        block = torch.zeros(self.kv_spec().block_shape(_BLOCK_SIZE), dtype=self.kv_dtype, device=device)
        blocks = torch.zeros(-(-context // _BLOCK_SIZE), dtype=torch.int32, device=device)  # that one, again and again
        span = PictureSpan(0, 0, context - num_tokens, context - num_tokens, context)
        query = torch.zeros(num_tokens, self.num_heads, self.head_dim, dtype=dtype, device=device)
        attend_both_ways(query, block[None], blocks, span, self.scale, self.sliding_window, self.kv_scales)
