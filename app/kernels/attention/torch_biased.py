"""Steps whose heads have biases of their own or sinks, in plain PyTorch: scaled_dot_product_attention knows no sink.

Tile by tile of queries, so that the scores of a long prompt are never there all at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.kernels.attention import AttentionMetadata, AttentionOptions

_TILE_SCORES = 1 << 24  # fp32 scores of a tile: 64 MiB


def attend_biased(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of query [T, Hq, D] -> [T, Hq, D]. `attend`: of a step with one request, as `naive_paged_attention`.

    A tile of a request's tokens sees what a request does that ends with the tile.
    """
    out = torch.empty_like(query)
    starts = meta.query_start_loc.tolist()
    for request, seq_len in enumerate(meta.seq_lens.tolist()):
        first, end = starts[request], starts[request + 1]
        rows = max(1, _TILE_SCORES // (query.shape[1] * max(1, seq_len)))
        for begin in range(first, end, rows):
            tile = slice(begin, min(end, begin + rows))
            step = _request_alone(meta, request, tile.stop - begin, seq_len - (end - tile.stop))
            out[tile] = attend(
                query[tile],
                kv_cache,
                step,
                scale=options.scale,
                sliding_window=options.sliding_window,
                soft_cap=options.soft_cap,
                kv_scales=options.kv_scales,
                bias=options.bias,
            )
    return out


def _request_alone(meta: AttentionMetadata, request: int, num_query: int, seq_len: int) -> AttentionMetadata:
    """A step of `num_query` tokens of one request, which end at `seq_len`."""
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, num_query], dtype=torch.int32),
        seq_lens=torch.tensor([seq_len], dtype=torch.int32),
        block_table=meta.block_table[request : request + 1],
        slot_mapping=meta.slot_mapping[:0],
        max_query_len=num_query,
        max_seq_len=seq_len,
        num_decodes=0,
    )
