"""Plans what one step's layers share in the PyTorch attention path: which blocks to gather together, and masks.

Layers may differ in their sliding window, so groups, tiles and masks are made on first use, once per window, and
kept until the step is over. Everything is derived from host copies of the lengths: one read per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.attention.torch_in_place import InPlaceGroup, plan_groups

# Blocks of a decode group are gathered into a buffer of at most so many elements, which the caches of a CPU hold.
_GROUP_ELEMENTS = 4 * 1024 * 1024
# Tokens of a request that share one mask; a smaller tile skips more of the hidden triangle, a larger one calls less.
_TILE_TOKENS = 256


@dataclass(slots=True, frozen=True)
class DecodeGroup:
    """Requests with one query token and about the same number of blocks; n requests, `length` gathered positions."""

    rows: torch.Tensor | None  # int64 [n]: request and, as decodes come first, row of `query`; None: the whole step
    pieces: torch.Tensor  # see `TorchPlan.pieces`
    span: slice  # positions of the gathered blocks that some request sees
    mask: torch.Tensor | None  # [n, 1, 1, length of span], 0 or -inf, in the dtype of `query`; None: all see all
    # Parts of `span` outside which nothing is hidden, and what is hidden there, bool [n, 1, part, 1].
    edges: tuple[tuple[slice, torch.Tensor], ...]


@dataclass(slots=True, frozen=True)
class QueryTile:
    """Consecutive query tokens of one request."""

    rows: slice  # into `query`
    pieces: torch.Tensor  # the request's blocks from the first position that a token of the tile sees
    span: slice  # into the gathered positions
    mask: torch.Tensor  # [tokens, length of span], 0 or -inf, in the dtype of `query`


@dataclass(slots=True)
class TorchPlan:
    """One step. Host copies of the metadata, and what was derived from them so far."""

    block_size: int
    num_kv_heads: int
    blocks_per_group: int
    starts: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor  # int64 [R, M]
    num_decodes: int
    groups: dict[tuple[int | None, torch.dtype], list[DecodeGroup]] = field(default_factory=dict)
    in_place: dict[int | None, list[InPlaceGroup]] = field(default_factory=dict)
    tiles: dict[tuple[int | None, torch.dtype], list[QueryTile]] = field(default_factory=dict)
    buffer: torch.Tensor | None = None  # [pieces, S * D]

    def decode_groups(self, sliding_window: int | None, dtype: torch.dtype) -> list[DecodeGroup]:
        """The first `num_decodes` requests, grouped by the blocks that they see through the window."""
        if (sliding_window, dtype) not in self.groups:
            self.groups[sliding_window, dtype] = [
                self._group(requests, sliding_window, dtype) for requests in self._partition(sliding_window)
            ]
        return self.groups[sliding_window, dtype]

    def in_place_groups(self, sliding_window: int | None, kv_cache: torch.Tensor, num_heads: int) -> list[InPlaceGroup]:
        """The same for decodes that read the cache in place; every layer's cache has the same shape."""
        if sliding_window not in self.in_place:
            lens = self.seq_lens[: self.num_decodes]
            seen = [(self._first_seen(length - 1, sliding_window), length) for length in lens]
            self.in_place[sliding_window] = plan_groups(seen, self.block_table, kv_cache, num_heads)
        return self.in_place[sliding_window]

    def query_tiles(self, sliding_window: int | None, dtype: torch.dtype) -> list[QueryTile]:
        """All other requests, cut into tiles of query tokens."""
        if (sliding_window, dtype) not in self.tiles:
            self.tiles[sliding_window, dtype] = list(self._cut(sliding_window, dtype))
        return self.tiles[sliding_window, dtype]

    def scratch(self, kv_cache: torch.Tensor, num_pieces: int) -> torch.Tensor:
        """[num_pieces, S * D] in the cache's type, overwritten by the step's next call."""
        if self.buffer is None or len(self.buffer) < num_pieces:
            num_rows = max(num_pieces, 2 * self.num_kv_heads * self.blocks_per_group)
            self.buffer = kv_cache.new_empty(num_rows, kv_cache.shape[3] * kv_cache.shape[4])
        return self.buffer[:num_pieces]

    def pieces(self, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks int64 [n, M] -> int64 [2, n, Hkv, M]: where the cache, seen as a table of [S, D] pieces, has the keys
        and the values of each KV head."""
        heads = torch.arange(2 * self.num_kv_heads, device=blocks.device).view(2, 1, -1, 1)
        return blocks[:, None] * (2 * self.num_kv_heads) + heads

    def _first_seen(self, position: int, sliding_window: int | None) -> int:
        return 0 if sliding_window is None else max(0, position - sliding_window + 1)

    def _num_blocks(self, request: int, sliding_window: int | None) -> int:
        last = self.seq_lens[request] - 1
        return last // self.block_size - self._first_seen(last, sliding_window) // self.block_size + 1

    def _partition(self, sliding_window: int | None) -> Iterator[list[int]]:
        """Decodes of similar length, cut where a group would outgrow the cache or pad its shortest by half."""
        sizes = [self._num_blocks(request, sliding_window) for request in range(self.num_decodes)]
        group: list[int] = []
        for request in sorted(range(self.num_decodes), key=sizes.__getitem__):
            size = sizes[request]
            if group and ((len(group) + 1) * size > self.blocks_per_group or size > 1.5 * sizes[group[0]] + 2):
                yield sorted(group)
                group = []
            group.append(request)
        if group:
            yield sorted(group)

    def _group(self, requests: list[int], sliding_window: int | None, dtype: torch.dtype) -> DecodeGroup:
        device, block_size = self.block_table.device, self.block_size
        lens = [self.seq_lens[request] for request in requests]
        seen = [self._first_seen(length - 1, sliding_window) for length in lens]
        first_blocks = [position // block_size for position in seen]
        num_blocks = max(self._num_blocks(request, sliding_window) for request in requests)
        rows = None if len(requests) == len(self.seq_lens) else torch.tensor(requests, device=device)
        table = self.block_table if rows is None else self.block_table.index_select(0, rows)
        columns = torch.tensor(first_blocks, device=device)[:, None] + torch.arange(num_blocks, device=device)
        columns.clamp_(max=self.block_table.shape[1] - 1)
        pieces = self.pieces(table.gather(1, columns))
        # From here on positions count from each request's first gathered slot.
        begins = [position - block * block_size for position, block in zip(seen, first_blocks, strict=True)]
        ends = [length - block * block_size for length, block in zip(lens, first_blocks, strict=True)]
        span = slice(min(begins), max(ends))
        if min(begins) == max(begins) and min(ends) == max(ends):
            return DecodeGroup(rows, pieces, span, None, ())
        positions = torch.arange(span.start, span.stop, device=device)
        hidden = positions >= torch.tensor(ends, device=device)[:, None]
        hidden |= positions < torch.tensor(begins, device=device)[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        ends_of_span = (slice(0, max(begins) - span.start), slice(min(ends) - span.start, span.stop - span.start))
        edges = tuple((edge, hidden[:, None, edge, None]) for edge in ends_of_span if edge.start < edge.stop)
        return DecodeGroup(rows, pieces, span, mask[:, None, None], edges)

    def _cut(self, sliding_window: int | None, dtype: torch.dtype) -> Iterator[QueryTile]:
        for request in range(self.num_decodes, len(self.seq_lens)):
            start, stop = self.starts[request], self.starts[request + 1]
            shift = self.seq_lens[request] - stop  # position = row + shift
            for row in range(start, stop, _TILE_TOKENS):
                yield self._tile(request, slice(row, min(row + _TILE_TOKENS, stop)), shift, sliding_window, dtype)

    def _tile(self, request: int, rows: slice, shift: int, sliding_window: int | None, dtype: torch.dtype) -> QueryTile:
        begin, end = self._first_seen(rows.start + shift, sliding_window), rows.stop + shift
        first_block = begin // self.block_size
        blocks = self.block_table[request, first_block : (end - 1) // self.block_size + 1]
        origin = first_block * self.block_size
        keys = torch.arange(begin, end, device=blocks.device)
        queries = torch.arange(rows.start + shift, end, device=blocks.device)[:, None]
        hidden = keys > queries
        if sliding_window is not None:
            hidden |= keys <= queries - sliding_window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=blocks.device).masked_fill_(hidden, float("-inf"))
        return QueryTile(rows, self.pieces(blocks[None]), slice(begin - origin, end - origin), mask)


def plan_step(meta: AttentionMetadata, *, num_kv_heads: int, head_dim: int, block_size: int) -> TorchPlan:
    """Read the lengths of `meta` to the host."""
    return TorchPlan(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        blocks_per_group=max(1, _GROUP_ELEMENTS // (2 * num_kv_heads * block_size * head_dim)),
        starts=meta.query_start_loc.tolist(),
        seq_lens=meta.seq_lens.tolist(),
        block_table=meta.block_table.long(),
        num_decodes=meta.num_decodes,
    )
