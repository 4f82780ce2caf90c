# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Pairs of tokens and experts sorted by expert on a GPU, with the list of tiles that a grouped product works through:
one launch, no value comes to the host, and all is allocated at its bound.

Each program counts all ids (reading them from the L2 cache takes less time than a second launch), so it knows where
each expert begins and how many of its pairs come before the program's own; then it places those. The order is stable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, early_launch, next_power_of_2

_OWN_PAIRS = 128  # that a program places
_READ = 1024  # ids that a program counts at a time


@dataclass(slots=True, frozen=True)
class SortedPairs:
    """What a grouped product over sorted pairs reads."""

    order: torch.Tensor  # int32 [T * K]: pairs t * K + k by expert; behind those of all experts undefined
    tiles: torch.Tensor  # int32 [3, bound]: a tile's expert, its first place in the order, its rows
    num_tiles: torch.Tensor  # int32 [1]: of the bound
    tile_rows: int


@triton.jit(do_not_specialize=["num_pairs", "MOST_TILES"])
def sort_pairs_kernel(
    p_ids, p_order, p_tiles, p_num_tiles, num_pairs, MOST_TILES,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, OWN: tl.constexpr, READ: tl.constexpr, BT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): each places OWN pairs and describes BT tiles. BE > E: pairs routed nowhere come last."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    o_e = tl.arange(0, BE)
    b_all = tl.zeros([BE], dtype=tl.int32)
    b_before = tl.zeros([BE], dtype=tl.int32)
    for start in range(0, num_pairs, READ):
        o = start + tl.arange(0, READ)
        b_ids = tl.load(p_ids + o, mask=o < num_pairs, other=-1)
        b_ids = tl.where(b_ids < 0, E, b_ids)
        b_all += tl.histogram(b_ids, BE)
        if start + READ <= i * OWN:
            b_before += tl.histogram(b_ids, BE)
        elif start < i * OWN:
            b_before += tl.histogram(tl.where(o < i * OWN, b_ids, E), BE)
    b_all = tl.where(o_e < E, b_all, 0)
    b_first = tl.cumsum(b_all, 0) - b_all
    # This program's own pairs.
    o, o_row = i * OWN + tl.arange(0, OWN), i * OWN + tl.arange(0, OWN)[None, :]
    b_own = tl.load(p_ids + o, mask=o < num_pairs, other=-1)
    b_row = tl.load(p_ids + o_row, mask=o_row < num_pairs, other=-1)
    b_rank = tl.sum(((b_own[:, None] == b_row) & (o_row < o[:, None])).to(tl.int32), 1)
    b_base = tl.sum(tl.where(b_own[:, None] == o_e[None, :], (b_first + b_before)[None, :], 0), 1)
    tl.store(p_order + b_base + b_rank, o, mask=b_own >= 0)
    # Its share of the tiles.
    b_tiles = (b_all + BM - 1) // BM
    b_end = tl.cumsum(b_tiles, 0)
    o_t = i * BT + tl.arange(0, BT)
    b_expert = tl.sum((b_end[None, :] <= o_t[:, None]).to(tl.int32), 1)
    m_mine = o_e[None, :] == b_expert[:, None]
    b_skip = (o_t - tl.sum(tl.where(m_mine, (b_end - b_tiles)[None, :], 0), 1)) * BM
    b_count = tl.sum(tl.where(m_mine, b_all[None, :], 0), 1)
    b_start = tl.sum(tl.where(m_mine, b_first[None, :], 0), 1)
    m_t = (o_t < MOST_TILES) & (b_expert < E)
    tl.store(p_tiles + o_t, b_expert, mask=m_t)
    tl.store(p_tiles + MOST_TILES + o_t, b_start + b_skip, mask=m_t)
    tl.store(p_tiles + 2 * MOST_TILES + o_t, tl.minimum(b_count - b_skip, BM), mask=m_t)
    if i == 0:
        tl.store(p_num_tiles, tl.sum(b_tiles, 0))


def sort_pairs(ids: torch.Tensor, num_experts: int, tile_rows: int) -> SortedPairs:
    """ids int32 [T, K], -1: nowhere; tiles of at most `tile_rows` pairs of one expert."""
    num_pairs = ids.numel()
    assert num_pairs > 0
    assert ids.is_contiguous()
    most = cdiv(num_pairs, tile_rows) + min(num_experts, num_pairs)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(3, most, dtype=torch.int32, device=ids.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=ids.device)
    own = _OWN_PAIRS if num_pairs <= 1 << 15 else 2 * _OWN_PAIRS
    programs = cdiv(num_pairs, own)
    sort_pairs_kernel[(programs,)](
        ids, order, tiles, num_tiles, num_pairs, most, E=num_experts, BE=next_power_of_2(num_experts + 1),
        BM=tile_rows, OWN=own, READ=_READ, BT=next_power_of_2(cdiv(most, programs)), num_warps=8,
        **early_launch(ids.device),
    )  # fmt: skip
    return SortedPairs(order, tiles, num_tiles, tile_rows)
