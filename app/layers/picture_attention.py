"""Attention of a decoder whose tokens of a picture see each other, those behind them too."""

from __future__ import annotations

import torch

from app.kernels.attention.both_ways import PictureSpan, attend_both_ways
from app.layers.attention import Attention
from app.layers.context import ForwardContext

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
