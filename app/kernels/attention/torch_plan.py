"""Plans what one step's layers share in the PyTorch attention path: which blocks to gather together, and masks.

Queries of decodes are attended together. So are those of requests with few of them, as drafts bring: each then stands
as a decode does, and reads the context for itself. Where that would be much to read, a request has tiles of its own.
Layers may differ in their sliding window, so groups, tiles and masks are made on first use, once per window, and
kept until the step is over. Everything is derived from host copies of the lengths: one read per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.attention.torch_in_place import InPlaceGroup, plan_groups

# Blocks of a decode group are gathered into a buffer of at most so many elements, which the caches of a CPU hold.
_GROUP_ELEMENTS = 4 * 1024 * 1024
# Tokens of a request that share one mask; a smaller tile skips more of the hidden triangle, a larger one calls less.
_TILE_TOKENS = 256
# Scores up to which a request's several queries stand alone: a tile takes 25 us of calls whatever it holds.
_MOST_ALONE = 8192


@dataclass(slots=True, frozen=True)
class DecodeGroup:
    """n queries that see about the same number of blocks, `length` gathered positions."""

    rows: torch.Tensor | None  # int64 [n] of `query`; None: the whole step
    pieces: torch.Tensor  # see `TorchPlan.pieces`
    span: slice  # positions of the gathered blocks that some query sees
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


@dataclass(slots=True, frozen=True)
class LoneQueries:
    """Queries that are attended as those of decodes are; n of them."""

    rows: list[int]  # of `query`, ascending
    seen: list[int]  # positions up to its own, of each
    block_table: torch.Tensor  # int64 [n, M]

    @property
    def are_first(self) -> bool:
        """True if they are the step's first tokens."""
        return not self.rows or self.rows[-1] == len(self.rows) - 1


@dataclass(slots=True)
class TorchPlan:
    """One step. Host copies of the metadata, and what was derived from them so far."""

    block_size: int
    num_kv_heads: int
    blocks_per_group: int
    starts: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor  # int64 [R, M]
    lone: LoneQueries
    tiled: list[int]  # all other requests
    groups: dict[tuple[int | None, torch.dtype], list[DecodeGroup]] = field(default_factory=dict)
    in_place: dict[int | None, list[InPlaceGroup]] = field(default_factory=dict)
    tiles: dict[tuple[int | None, torch.dtype], list[QueryTile]] = field(default_factory=dict)
    buffer: torch.Tensor | None = None  # [pieces, S * D]

    def decode_groups(self, sliding_window: int | None, dtype: torch.dtype) -> list[DecodeGroup]:
        """The lone queries, grouped by the blocks that they see through the window."""
        if (sliding_window, dtype) not in self.groups:
            self.groups[sliding_window, dtype] = [
                self._group(queries, sliding_window, dtype) for queries in self._partition(sliding_window)
            ]
        return self.groups[sliding_window, dtype]

    def in_place_groups(self, sliding_window: int | None, kv_cache: torch.Tensor, num_heads: int) -> list[InPlaceGroup]:
        """The same where they read the cache in place; every layer's cache has the same shape."""
        if sliding_window not in self.in_place:
            lone = self.lone
            seen = [(self._first_seen(end - 1, sliding_window), end) for end in lone.seen]
            groups = plan_groups(seen, lone.block_table, kv_cache, num_heads)
            if not lone.are_first:
                rows = torch.tensor(lone.rows)
                groups = [replace(one, rows=rows if one.rows is None else rows[one.rows]) for one in groups]
            self.in_place[sliding_window] = groups
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

    def _num_blocks(self, query: int, sliding_window: int | None) -> int:
        last = self.lone.seen[query] - 1
        return last // self.block_size - self._first_seen(last, sliding_window) // self.block_size + 1

    def _partition(self, sliding_window: int | None) -> Iterator[list[int]]:
        """Lone queries of similar length, cut where a group would outgrow the cache or pad its shortest by half."""
        sizes = [self._num_blocks(query, sliding_window) for query in range(len(self.lone.rows))]
        group: list[int] = []
        for query in sorted(range(len(sizes)), key=sizes.__getitem__):
            size = sizes[query]
            if group and ((len(group) + 1) * size > self.blocks_per_group or size > 1.5 * sizes[group[0]] + 2):
                yield sorted(group)
                group = []
            group.append(query)
        if group:
            yield sorted(group)

    def _group(self, queries: list[int], sliding_window: int | None, dtype: torch.dtype) -> DecodeGroup:
        lone, device, block_size = self.lone, self.block_table.device, self.block_size
        lens = [lone.seen[query] for query in queries]
        seen = [self._first_seen(length - 1, sliding_window) for length in lens]
        first_blocks = [position // block_size for position in seen]
        num_blocks = max(self._num_blocks(query, sliding_window) for query in queries)
        rows, table = None, lone.block_table
        if self.tiled or len(queries) < len(lone.rows):
            rows = torch.tensor([lone.rows[query] for query in queries], device=device)
            table = table.index_select(0, torch.tensor(queries, device=device))
        columns = torch.tensor(first_blocks, device=device)[:, None] + torch.arange(num_blocks, device=device)
        columns.clamp_(max=self.block_table.shape[1] - 1)
        pieces = self.pieces(table.gather(1, columns))
        # From here on positions count from each query's first gathered slot.
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
        for request in self.tiled:
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


def plan_step(
    meta: AttentionMetadata, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> TorchPlan:
    """Read the lengths of `meta` to the host."""
    starts, lens, table = meta.query_start_loc.tolist(), meta.seq_lens.tolist(), meta.block_table.long()
    lone, tiled = _alone(starts, lens, table, _MOST_ALONE // num_heads)
    return TorchPlan(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        blocks_per_group=max(1, _GROUP_ELEMENTS // (2 * num_kv_heads * block_size * head_dim)),
        starts=starts,
        seq_lens=lens,
        block_table=table,
        lone=lone,
        tiled=tiled,
    )


def _alone(starts: list[int], lens: list[int], block_table: torch.Tensor, most: int) -> tuple[LoneQueries, list[int]]:
    """Returns the queries that stand alone, `most` scores of a head at most where a request has several, and which
    requests have other ones."""
    rows, seen, requests, tiled = list[int](), list[int](), list[int](), list[int]()
    for request, (begin, end, length) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        if end - begin > 1 and (end - begin) * length > most:
            tiled.append(request)
            continue
        rows += range(begin, end)
        seen += range(length - end + begin + 1, length + 1)
        requests += [request] * (end - begin)
    own = block_table if requests == list(range(len(lens))) else block_table[requests]
    return LoneQueries(rows, seen, own), tiled
