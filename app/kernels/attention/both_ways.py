"""Attention of a picture's tokens, which see all before them and each other, those behind them too (Gemma 3, 4).

Plain PyTorch on every device: a prompt with pictures computes it once for each, beside the causal attention of all
tokens, whose results for these it replaces. Keys and values of the whole picture are in the cache by then. Heads of the
cache are read one after another, so that a long context takes the memory of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from app.kernels.attention.reference import movable, readable


@dataclass(slots=True, frozen=True)
class PictureSpan:
    """The tokens of a picture that a step computes, by place in the step and in the request."""

    request: int  # of the step's
    token: int  # the first one's place in the step
    first: int  # its position
    begin: int  # of the whole picture
    end: int

    @property
    def tokens(self) -> slice:
        """The places in the step."""
        return slice(self.token, self.token + self.end - self.first)


def attend_both_ways(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    blocks: torch.Tensor,
    span: PictureSpan,
    scale: float,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [n, Hq, D] of the span's tokens over kv_cache [B, 2, Hkv, S, D], of which `blocks` [M] are the request's ->
    [n, Hq, D]. A window bounds what lies before a token, of the picture, too."""
    size, device = kv_cache.shape[3], query.device
    lowest = 0 if sliding_window is None else max(0, span.first - sliding_window + 1)
    first_block = lowest // size
    chosen = blocks[first_block : -(-span.end // size)].long()
    keys = first_block * size + torch.arange(len(chosen) * size, device=device)
    own = torch.arange(span.first, span.end, device=device)[:, None]
    seen = (keys <= own) | ((keys >= span.begin) & (keys < span.end))
    if sliding_window is not None:
        seen &= keys > own - sliding_window
    count, num_heads, width = query.shape
    num_kv_heads, out = kv_cache.shape[2], query.new_empty(query.shape)
    shape = count, num_kv_heads, num_heads // num_kv_heads, width
    grouped, results = query.reshape(shape).permute(1, 2, 0, 3), out.view(shape)  # [Hkv, Hq / Hkv, n, D]
    for head in range(num_kv_heads):
        stored = movable(kv_cache[:, :, head]).index_select(0, chosen).view(kv_cache.dtype)
        both = readable(stored, query.dtype).transpose(0, 1).flatten(1, 2)  # [2, L, D]
        if kv_scales is not None:
            both = (both * kv_scales[:, head, None, None]).to(query.dtype)
        key, value = (one.expand(grouped.shape[1], -1, -1) for one in both)
        attended = F.scaled_dot_product_attention(grouped[head], key, value, attn_mask=seen, scale=scale)
        results[:, head] = attended.transpose(0, 1)
    return out
