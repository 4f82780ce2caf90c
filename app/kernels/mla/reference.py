"""Latent attention in plain PyTorch: the truth (`naive_latent_attention`) and the CPU path (`OPS`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from app.kernels.attention import KV_FP8, AttentionMetadata
from app.kernels.float8 import widened
from app.kernels.mla import MLAOps

_TILE_TOKENS = 256  # whose scores are held at a time


@dataclass(slots=True)
class LatentPlan:
    """Host copies of a step's lengths."""

    block_size: int
    starts: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor  # int64 [R, M]

    def requests(self) -> Iterator[tuple[slice, int, torch.Tensor]]:
        """Each request's rows in the step, length and blocks."""
        for request, length in enumerate(self.seq_lens):
            rows = slice(self.starts[request], self.starts[request + 1])
            yield rows, length, self.block_table[request, : -(-length // self.block_size)]


def prepare(meta: AttentionMetadata, *, num_heads: int, block_size: int) -> None:
    """Set meta.plan: what every layer of the step shares."""
    starts, seq_lens = meta.query_start_loc.tolist(), meta.seq_lens.tolist()
    meta.plan = LatentPlan(block_size, starts, seq_lens, meta.block_table.long())


def naive_latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    up: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keys and values of all heads, expanded in float64, request by request: the judge of both ways.

    query [T, H, Dn + Dr], cache [B, S, R + Dr], up [H, Dn + Dv, R] -> [T, H, Dv].
    """
    prepare(meta, num_heads=query.shape[1], block_size=cache.shape[1])
    size, nope, num_heads = up.shape[2], up.shape[1] - value_dim, query.shape[1]
    out = query.new_empty(*query.shape[:2], value_dim)
    for rows, length, blocks in _plan(meta).requests():
        latents = _stored(cache, blocks, 0, length, torch.float64, kv_scale)
        both = torch.einsum("kr,hdr->khd", latents[:, :size], up.double())
        shared = latents[:, None, size:].expand(-1, num_heads, -1)
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), torch.cat((both[..., :nope], shared), -1)) * scale
        scores = scores.masked_fill(_hidden(rows, length, 0, length, query.device), -math.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), both[..., nope:]).to(query.dtype)
    return out


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    latent_size: int,
    kv_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [T, H, R + Dr] -> [T, H, R]."""
    out = query.new_empty(*query.shape[:2], latent_size)
    for rows, length, blocks in _plan(meta).requests():
        latents = _stored(cache, blocks, 0, length, query.dtype, kv_scale)
        for tile in _tiles(rows):
            end = length - (rows.stop - tile.stop)  # positions that the tile's last token sees
            scores = (query[tile].transpose(0, 1) @ latents[:end].t()).float() * scale  # [H, n, end]
            probs = scores.masked_fill_(_hidden(tile, end, 0, end, query.device), -math.inf).softmax(-1)
            out[tile] = (probs.to(query.dtype) @ latents[:end, :latent_size]).transpose(0, 1)
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
    """query [T, H, Dn + Dr] -> [T, H, Dv]."""
    out = query.new_empty(*query.shape[:2], value_dim)
    size, nope = up.shape[2], up.shape[1] - value_dim
    for rows, length, blocks in _plan(meta).requests():
        shape = query.shape[1], rows.stop - rows.start
        parts = Merged(
            query.new_zeros(*shape, value_dim, dtype=torch.float32),
            query.new_full(shape, -math.inf, dtype=torch.float32),
        )
        for begin in range(0, length, len(workspace)):
            end = min(begin + len(workspace), length)
            latents = _stored(cache, blocks, begin, end, query.dtype, kv_scale)
            both = workspace[: end - begin]
            torch.mm(latents[:, :size], up.flatten(0, 1).t(), out=both.flatten(1))
            for tile in _tiles(rows):
                asked = query[tile].transpose(0, 1)  # [H, n, Dn + Dr]
                scores = asked[..., :nope] @ both[..., :nope].permute(1, 2, 0)
                scores = (scores + asked[..., nope:] @ latents[:, size:].t()).float() * scale
                last = length - (rows.stop - tile.stop)
                scores.masked_fill_(_hidden(tile, last, begin, end, query.device), -math.inf)
                place = slice(tile.start - rows.start, tile.stop - rows.start)
                parts.add(place, scores, both[..., nope:].transpose(0, 1))
        out[rows] = parts.total.transpose(0, 1).to(query.dtype)
    return out


@dataclass(slots=True, frozen=True)
class Merged:
    """Attention over the parts of a context so far, joined by the logarithms of their sums (Milakov and Gimelshein,
    "Online normalizer calculation for softmax", 2018). The first part has something that each token sees."""

    total: torch.Tensor  # fp32 [H, n, Dv]
    log_sum: torch.Tensor  # fp32 [H, n]

    def add(self, place: slice, scores: torch.Tensor, values: torch.Tensor) -> None:
        """One more part, of tokens `place`: scores fp32 [H, tokens, keys], values [H, keys, Dv]."""
        before = self.log_sum[:, place]
        joined = torch.logaddexp(before, scores.logsumexp(-1))
        probs = (scores - joined[..., None]).exp().to(values.dtype)
        self.total[:, place] *= (before - joined).exp()[..., None]
        self.total[:, place] += (probs @ values).float()
        self.log_sum[:, place] = joined


def _plan(meta: AttentionMetadata) -> LatentPlan:
    assert isinstance(meta.plan, LatentPlan), "call prepare(meta, ...) before the first layer"
    return meta.plan


def _tiles(rows: slice) -> Iterator[slice]:
    """A request's tokens, not too many at a time."""
    for start in range(rows.start, rows.stop, _TILE_TOKENS):
        yield slice(start, min(start + _TILE_TOKENS, rows.stop))


def _stored(
    cache: torch.Tensor, blocks: torch.Tensor, begin: int, end: int, dtype: torch.dtype, kv_scale: torch.Tensor | None
) -> torch.Tensor:
    """Positions `begin` to `end` of a request with these blocks, [end - begin, R + Dr]."""
    block_size, first = cache.shape[1], begin // cache.shape[1]
    table = cache.view(torch.uint8) if cache.dtype == KV_FP8 else cache  # PyTorch lacks indexing of fp8
    found = table[blocks[first : -(-end // block_size)]].view(cache.dtype).flatten(0, 1)
    found = found[begin - first * block_size : end - first * block_size]
    found = widened(found, dtype) if cache.dtype == KV_FP8 else found.to(dtype)
    return found if kv_scale is None else found * kv_scale.to(dtype)


def _hidden(rows: slice, length: int, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Tells which of positions `begin` to `end` lie behind each of the last tokens before `length`, bool [n, end
    - begin]."""
    first = length - (rows.stop - rows.start)
    return torch.arange(begin, end, device=device)[None, :] > torch.arange(first, length, device=device)[:, None]


OPS = MLAOps(prepare=prepare, attend=attend, attend_expanded=attend_expanded)
