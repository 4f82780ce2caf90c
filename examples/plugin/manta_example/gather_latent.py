"""Latent attention in a few lines of torch, for models that cache one vector a token for all heads. Slow and plain."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from app.kernels.attention import AttentionMetadata
from app.kernels.mla import MLAOps


def prepare(meta: AttentionMetadata, *, num_heads: int, block_size: int) -> None:
    """Keep the step's lengths on the host."""
    meta.plan = (meta.query_start_loc.tolist(), meta.seq_lens.tolist())


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    latent_size: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See MLAOps: the vectors are the one key of all heads, their latents the values."""
    out = query.new_empty(*query.shape[:2], latent_size)
    for rows, vectors, sees in _requests(cache, meta):
        out[rows] = _attended(query[rows], vectors[None], vectors[None, :, :latent_size], sees, scale)
    return out


def attend_expanded(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    up: torch.Tensor,
    workspace: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """See MLAOps: keys and values of each head are computed from the latents."""
    out = query.new_empty(*query.shape[:2], value_dim)
    for rows, vectors, sees in _requests(cache, meta):
        latents, rotated = vectors.split((up.shape[2], vectors.shape[1] - up.shape[2]), dim=1)
        keys, values = torch.einsum("kr,hdr->hkd", latents, up).split((up.shape[1] - value_dim, value_dim), dim=2)
        keys = torch.cat((keys, rotated.expand(len(up), -1, -1)), dim=2)
        out[rows] = _attended(query[rows], keys, values, sees, scale)
    return out


def _requests(cache: torch.Tensor, meta: AttentionMetadata) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Each request's rows of the step, its cached vectors [length, R + Dr], and which of them each row sees."""
    assert isinstance(meta.plan, tuple)
    starts, lengths = meta.plan
    for r, length in enumerate(lengths):
        blocks = meta.block_table[r, : -(-length // cache.shape[1])].long()
        position = torch.arange(length, device=cache.device)
        sees = position <= position[length - (starts[r + 1] - starts[r]) :, None]
        yield slice(starts[r], starts[r + 1]), cache[blocks].flatten(0, 1)[:length], sees


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sees: torch.Tensor, scale: float
) -> torch.Tensor:
    """query [n, H, D], keys and values [H or 1, length, ...] -> [n, H, width of values]."""
    heads = query.transpose(0, 1)
    keys, values = (x.expand(len(heads), -1, -1) for x in (keys, values))
    return F.scaled_dot_product_attention(heads[None], keys[None], values[None], sees, scale=scale)[0].transpose(0, 1)


OPS = MLAOps(prepare, attend, attend_expanded)
