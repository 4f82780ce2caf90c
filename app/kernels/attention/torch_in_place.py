"""Decodes on a CPU without a copy of the cache: it is a table of vectors, and a context a list of row numbers.

Scores are a product sampled at those rows (`torch.sparse.sampled_addmm`, a CSR matrix with one row for each query
head), attended values a weighted sum of rows (`torch.embedding_bag`). The table of values is the table of keys, moved
by Hkv * S rows. Nothing that a request does not see is read, so slots nobody wrote may hold NaN.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# Scores of a group, so that they stay in a core's cache from product to product.
_GROUP_SCORES = 512 * 1024
# A group is cut where its shortest request would be padded by more than a quarter of itself and a few tokens.
_MOST_PADDING, _FREE_PADDING = 0.25, 32


@dataclass(slots=True, frozen=True)
class InPlaceGroup:
    """n queries, padded to the `length` that the one sees that sees most."""

    rows: torch.Tensor | None  # int64 [n] of `query`; None: its first n
    matrix: torch.Tensor  # sparse CSR fp32 [n * Hq, rows of the table], `length` entries a row; its values are scratch
    hidden: torch.Tensor | None  # bool [n, 1, length], True = padding; None: there is none


def plan_groups(
    seen: list[tuple[int, int]], block_table: torch.Tensor, kv_cache: torch.Tensor, num_heads: int
) -> list[InPlaceGroup]:
    """`seen[r]` = (first, end) of the positions that request r attends to; block_table int64 [R, M]."""
    parts = list(_partition([end - first for first, end in seen], num_heads))
    if len(parts) == 1:
        return [_group(None, seen, block_table[: len(seen)], kv_cache, num_heads)]
    groups = []
    for requests in parts:
        rows = torch.tensor(requests)
        part = [seen[request] for request in requests]
        groups.append(_group(rows, part, block_table.index_select(0, rows), kv_cache, num_heads))
    return groups


def attend(
    query: torch.Tensor, kv_cache: torch.Tensor, group: InPlaceGroup, scale: float, soft_cap: float | None
) -> torch.Tensor:
    """Attention of the group's queries fp32 [n, Hq, D] -> [n, Hq, D]."""
    num_requests, num_heads, head_dim = query.shape
    table = kv_cache.view(-1, head_dim)
    matrix = group.matrix
    matrix.values().zero_()  # beta=0 multiplies what was there, and 0 * NaN is NaN
    torch.sparse.sampled_addmm(matrix, query.reshape(-1, head_dim), table.t(), beta=0.0, alpha=scale, out=matrix)
    scores = matrix.values().view(num_requests, num_heads, -1)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap).mul_(soft_cap)
    if group.hidden is not None:
        scores = scores.masked_fill(group.hidden, float("-inf"))
    values = table[kv_cache.shape[2] * kv_cache.shape[3] :]
    attended, *_ = torch.embedding_bag(
        values,
        matrix.col_indices(),
        matrix.crow_indices(),
        mode=0,  # sum
        per_sample_weights=torch.softmax(scores, dim=-1).view(-1),
        include_last_offset=True,
    )
    return attended.view_as(query)


def serves(query: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """True if the operators work here: fp32, on a CPU, and a build of PyTorch that has them."""
    if query.device.type != "cpu" or query.dtype != torch.float32 or kv_cache.dtype != torch.float32:
        return False
    return kv_cache.is_contiguous() and _works()


@functools.cache
def _works() -> bool:
    """One request whose four keys and values are known; PyTorch's note that CSR is new is heard here, once."""
    kv_cache = torch.arange(32.0).view(2, 2, 1, 4, 2) / 32.0
    query = torch.tensor([[[0.5, -1.0]]])
    key, value = kv_cache[1, :, 0].unbind(0)
    expected = torch.softmax(query[0] @ key.t(), dim=-1) @ value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            (group,) = plan_groups([(0, 4)], torch.tensor([[1]]), kv_cache, 1)
            # Not torch.testing: its first use imports torch.distributed.tensor, more than half a second.
            return torch.allclose(attend(query, kv_cache, group, 1.0, None)[0], expected, rtol=1e-5, atol=1e-5)
        except (RuntimeError, NotImplementedError, TypeError):
            return False


def _partition(lengths: list[int], num_heads: int) -> Iterator[list[int]]:
    """Requests sorted by length, cut where a group would outgrow the cache or pad its shortest too much."""
    group: list[int] = []
    for request in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[request]
        if group:
            large = length * num_heads * (len(group) + 1) > _GROUP_SCORES
            if large or length > lengths[group[0]] * (1 + _MOST_PADDING) + _FREE_PADDING:
                yield group
                group = []
        group.append(request)
    if group:
        yield group


def _group(
    rows: torch.Tensor | None,
    seen: list[tuple[int, int]],
    block_table: torch.Tensor,
    kv_cache: torch.Tensor,
    num_heads: int,
) -> InPlaceGroup:
    """block_table int64 [n, M] of the group's requests."""
    _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    first, end = torch.tensor(seen).unsqueeze(2).unbind(1)  # [n, 1]
    lengths = end - first
    length = int(lengths.max())
    positions = torch.arange(length) + first
    hidden = (positions >= end).unsqueeze(1) if int(lengths.min()) < length else None
    positions = torch.minimum(positions, end - 1)  # padding repeats the last position, which is finite
    blocks = positions // block_size
    starts = block_table.gather(1, blocks) * (2 * num_kv_heads * block_size) + (positions - blocks * block_size)
    num_rows = kv_cache.numel() // head_dim
    dtype = torch.int32 if num_rows < 2**31 else torch.int64
    heads = torch.arange(num_heads, dtype=dtype) // (num_heads // num_kv_heads) * block_size
    columns = (starts.to(dtype).unsqueeze(1) + heads.unsqueeze(1)).view(-1)
    offsets = torch.arange(0, columns.numel() + 1, length, dtype=dtype)
    shape = (len(seen) * num_heads, num_rows)
    matrix = torch.sparse_csr_tensor(offsets, columns, torch.zeros(len(columns)), shape, check_invariants=False)
    return InPlaceGroup(rows, matrix, hidden)
