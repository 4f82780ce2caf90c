"""Attention in a few lines of torch: gather a request's context, then scaled_dot_product_attention. Slow and plain."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.kernels.attention import AttentionMetadata, AttentionOps
from app.kernels.attention.reference import write_kv


def prepare(meta: AttentionMetadata, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Keep the step's lengths on the host."""
    meta.plan = (meta.query_start_loc.tolist(), meta.seq_lens.tolist())


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See AttentionOps."""
    assert soft_cap is None, "not among the features"
    assert kv_scales is None, "not among the features"
    assert isinstance(meta.plan, tuple)
    starts, lengths = meta.plan
    out = torch.empty_like(query)
    for r, length in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        blocks = kv_cache[meta.block_table[r, : -(-length // kv_cache.shape[3])].long()]  # [b, 2, Hkv, S, D]
        key, value = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # [Hkv, length, D] each
        sees = _sees(length, rows.stop - rows.start, sliding_window, query.device)
        of_request = query[rows].transpose(0, 1)[None]  # [1, Hq, n, D]
        found = F.scaled_dot_product_attention(of_request, key[None], value[None], sees, scale=scale, enable_gqa=True)
        out[rows] = found[0].transpose(0, 1)
    return out


def _sees(length: int, count: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [count, length]: which positions each of the last `count` tokens sees."""
    position = torch.arange(length, device=device)
    of_query = position[length - count :, None]
    sees = position <= of_query
    return sees if window is None else sees & (position > of_query - window)


OPS = AttentionOps(
    prepare,
    write_kv,
    paged_attention,
    device_types=("cpu", "cuda"),
    features=frozenset({"sliding_window"}),
    latent="manta_example.gather_latent:OPS",
)
