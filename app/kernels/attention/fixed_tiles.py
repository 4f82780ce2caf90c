"""Paged attention on a CPU whose result for a token depends on its own request's tokens before it alone, to the bit.

All products are of one shape: a tile of queries of a KV head, 16 rows or the next multiple, times 128 keys. Tiles and
blocks of keys begin at multiples of absolute positions, so a token has the same row of the same tile, and its keys lie
in the same blocks, whether it comes alone, in a chunk of any size or behind a cached prefix. Sums over a block are
trees (`exact_math`), those over blocks go from the first to the last; keys that a token does not see weigh exactly 0
and change no sum. Arithmetic is in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.kernels.attention import AttentionMetadata, AttentionOps, AttentionOptions, HeadBias
from app.kernels.attention.reference import write_kv
from app.kernels.exact_math import exp, tanh, tree_sum

KEYS = 128  # positions of a block of keys
_ROWS = 16  # of a tile are a multiple of so many
_GROUP_SCORES = 1 << 18  # fp32 scores that are worked on together, so that they stay in a core's cache


@dataclass(slots=True, frozen=True)
class StepPlan:
    """Copies of a step's lengths on the host."""

    starts: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor  # int64 [R, M]


@dataclass(slots=True, frozen=True)
class Context:
    """Keys and values of a request from block `first` on, fp32 [blocks, Hkv, KEYS, D] each; 0 where none are seen."""

    first: int
    keys: torch.Tensor
    values: torch.Tensor


def prepare(meta: AttentionMetadata, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Set meta.plan."""
    meta.plan = StepPlan(meta.query_start_loc.tolist(), meta.seq_lens.tolist(), meta.block_table.long())


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    bias: HeadBias | None = None,
) -> torch.Tensor:
    """query [T, Hq, D] over kv_cache [B, 2, Hkv, S, D] -> [T, Hq, D], request by request."""
    plan = meta.plan
    assert isinstance(plan, StepPlan), "call prepare(meta, ...) before the first layer"
    assert (kv_scales, bias) == (None, None), "it serves none of these (OPS.features)"
    out, options = torch.empty_like(query), AttentionOptions(scale, sliding_window, soft_cap)
    for request, end in enumerate(plan.seq_lens):
        rows = slice(plan.starts[request], plan.starts[request + 1])
        if rows.start < rows.stop:
            first = end - (rows.stop - rows.start)
            seen = 0 if sliding_window is None else max(0, first - sliding_window + 1)
            context = _gather(kv_cache, plan.block_table[request], seen, end)
            out[rows] = _attend(query[rows], context, first, options)
    return out


def _gather(kv_cache: torch.Tensor, blocks: torch.Tensor, seen: int, end: int) -> Context:
    """Keys and values at positions seen .. end - 1, in whole blocks of KEYS."""
    first, last = seen // KEYS, (end - 1) // KEYS
    block_size = kv_cache.shape[3]
    positions = torch.arange(seen, end)
    entries = blocks[positions // block_size]
    found = kv_cache[entries, :, :, positions % block_size]  # [end - seen, 2, Hkv, D]
    whole = torch.zeros(2, (last + 1 - first) * KEYS, kv_cache.shape[2], kv_cache.shape[4])
    whole[:, seen - first * KEYS : end - first * KEYS] = found.transpose(0, 1)
    keys, values = whole.view(2, -1, KEYS, *whole.shape[2:]).transpose(2, 3).contiguous().unbind(0)
    return Context(first, keys, values)


def _attend(query: torch.Tensor, context: Context, first: int, options: AttentionOptions) -> torch.Tensor:
    """Queries [n, Hq, D] of a request's tokens from position `first` on -> [n, Hq, D]."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = context.keys.shape[1]
    group = num_heads // num_kv_heads
    length = max(1, _ROWS // group)  # positions of a tile
    begin = first // length * length
    count = -(-(first + num_queries - begin) // length)
    rows = -(-length * group // _ROWS) * _ROWS
    placed = torch.zeros(count * length, num_kv_heads, group, head_dim)
    placed[first - begin : first - begin + num_queries] = query.view(num_queries, num_kv_heads, group, head_dim)
    tiles = torch.zeros(count, num_kv_heads, rows, head_dim)
    of_tile = placed.view(count, length, *placed.shape[1:]).transpose(1, 2)  # [count, Hkv, length, group, D]
    tiles[:, :, : length * group] = of_tile.flatten(2, 3).mul_(options.scale)
    window = options.sliding_window
    spans = [
        _span(begin + tile * length, min(begin + (tile + 1) * length, first + num_queries), window, context)
        for tile in range(count)
    ]
    positions = begin + torch.arange(count * length).view(count, length).repeat_interleave(group, dim=1)
    done = 0
    while done < count:  # as many tiles as the caches hold
        size = 1
        while done + size < count and (size + 1) * _width(
            spans[done : done + size + 1]
        ) * num_kv_heads * rows * KEYS <= (_GROUP_SCORES):
            size += 1
        part = slice(done, done + size)
        tiles[part] = _attend_tiles(tiles[part], context, spans[part], positions[part], options)
        done += size
    attended = tiles[:, :, : length * group].reshape(count, num_kv_heads, length, group, head_dim)
    attended = attended.transpose(1, 2).flatten(0, 1)
    return attended[first - begin : first - begin + num_queries].reshape(query.shape).to(query.dtype)


def _span(begin: int, end: int, sliding_window: int | None, context: Context) -> tuple[int, int]:
    """The blocks of keys, counted from the context's first, that tokens at begin .. end - 1 see."""
    seen = 0 if sliding_window is None else max(0, begin - sliding_window + 1)
    return max(0, seen // KEYS - context.first), (end - 1) // KEYS + 1 - context.first


def _width(spans: list[tuple[int, int]]) -> int:
    return max(stop for _, stop in spans) - min(start for start, _ in spans)


def _attend_tiles(
    tiles: torch.Tensor,
    context: Context,
    spans: list[tuple[int, int]],
    positions: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Scaled queries [n, Hkv, rows, D] at positions [n, rows that are tokens'] -> their attention, [n, Hkv, rows, D].

    A block that a tile does not see has scores of -inf, whose powers are 0.
    """
    low, width = min(start for start, _ in spans), _width(spans)
    scores = tiles.new_full((len(tiles), width, *tiles.shape[1:3], KEYS), float("-inf"))
    for tile, (start, stop) in enumerate(spans):
        for block in range(start, stop):
            torch.bmm(tiles[tile], context.keys[block].transpose(1, 2), out=scores[tile, block - low])
    if options.soft_cap is not None:
        scores = tanh(scores / options.soft_cap).mul_(options.soft_cap)
    keys = (context.first + low) * KEYS + torch.arange(width * KEYS).view(width, 1, KEYS)
    tokens = positions.view(len(tiles), 1, -1, 1)
    hidden = keys > tokens
    if options.sliding_window is not None:
        hidden |= keys <= tokens - options.sliding_window
    scores[:, :, :, : positions.shape[1]].masked_fill_(hidden.unsqueeze(2), float("-inf"))
    powers = exp(scores.sub_(scores.amax(dim=(1, 4), keepdim=True)))
    sums, of_blocks = torch.zeros(tiles.shape[:3]), tree_sum(powers)
    for block in range(width):
        sums.add_(of_blocks[:, block])
    attended = torch.zeros_like(tiles)
    for tile, (start, stop) in enumerate(spans):
        for block in range(start, stop):
            attended[tile].add_(torch.bmm(powers[tile, block - low], context.values[block]))
    return attended.div_(sums.unsqueeze(-1))


OPS = AttentionOps(
    prepare=prepare,
    write_kv=write_kv,
    paged_attention=paged_attention,
    device_types=("cpu",),
    features=frozenset({"sliding_window", "soft_cap"}),
    is_exact=True,
    name="torch_exact",
)
