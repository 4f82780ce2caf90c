"""Attention of a picture's tokens, which see all before them and each other, those behind them too (Gemma 3, 4).

Plain PyTorch on every device: a prompt with pictures computes it once for each, beside the causal attention of all
tokens, whose results for these it replaces. Keys and values of the whole picture are in the cache by then.
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
    stored = movable(kv_cache).index_select(0, chosen).view(kv_cache.dtype)
    both = readable(stored, query.dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)  # [2, Hkv, L, D]
    if kv_scales is not None:
        both = (both * kv_scales[:, :, None, None]).to(query.dtype)
    both = both.repeat_interleave(query.shape[1] // both.shape[1], dim=1)
    keys = first_block * size + torch.arange(both.shape[2], device=device)
    own = torch.arange(span.first, span.end, device=device)[:, None]
    seen = (keys <= own) | ((keys >= span.begin) & (keys < span.end))
    if sliding_window is not None:
        seen &= keys > own - sliding_window
    out = F.scaled_dot_product_attention(query.transpose(0, 1), both[0], both[1], attn_mask=seen, scale=scale)
    return out.transpose(0, 1)
