# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Pairs of tokens and experts sorted by expert on a GPU, with the list of tiles that a grouped product works through:
no value comes to the host, and all is allocated at its bound.

Each program places some pairs. For that it must know how many pairs each expert has, and how many of them come before
the program's own: where pairs are few it counts all ids itself, which takes less time than another launch; where they
are more, a launch before it has counted those of every program, and where they are many, another one has added these
up. The order is stable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

MOST_AT_ONCE = 4096  # pairs that every program counts itself
MOST_COUNTED = 1 << 15  # of which every program adds up the counts itself
_EXPERTS = 16  # whose counts a program adds up
_COUNTS, _MANY_COUNTS = 32, 64  # programs' counts that are added up at a time
_IDS = 1024  # ids that are counted at a time


@dataclass(slots=True, frozen=True)
class SortedPairs:
    """Holds what a grouped product over sorted pairs reads."""

    order: torch.Tensor  # int32 [T * K]: pairs t * K + k by expert; behind those of all experts undefined
    tiles: torch.Tensor  # int32 [3, bound]: a tile's expert, its first place in the order, its rows
    num_tiles: torch.Tensor  # int32 [1]: of the bound
    tile_rows: int


@quick_launch
@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(p_ids, p_counts, num_pairs, E: tl.constexpr, BE: tl.constexpr, OWN: tl.constexpr,
                       EARLY: tl.constexpr):  # fmt: skip
    """Grid (programs,): p_counts [programs, BE], how many of its pairs go to each expert; E: nowhere."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    o = i * OWN + tl.arange(0, OWN)
    b_ids = tl.load(p_ids + o, mask=o < num_pairs, other=-1)
    tl.store(p_counts + i * BE + tl.arange(0, BE), tl.histogram(tl.where(b_ids < 0, E, b_ids), BE))


@quick_launch
@triton.jit(do_not_specialize=["programs"])
def add_counts_kernel(p_counts, p_all, programs, BE: tl.constexpr, EXPERTS: tl.constexpr, READ: tl.constexpr,
                      EARLY: tl.constexpr):  # fmt: skip
    """Grid (BE / EXPERTS,): p_counts [programs, BE] become those of all programs before, p_all [BE] those of all."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    o_e = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    b_all = tl.zeros([EXPERTS], dtype=tl.int32)
    for start in range(0, programs, READ):
        o_p = start + tl.arange(0, READ)[:, None]
        p_count, m_p = p_counts + o_p * BE + o_e[None, :], o_p < programs
        b_count = tl.load(p_count, mask=m_p, other=0)
        tl.store(p_count, b_all[None, :] + tl.cumsum(b_count, 0) - b_count, mask=m_p)
        b_all += tl.sum(b_count, 0)
    tl.store(p_all + o_e, b_all)


@quick_launch
@triton.jit(do_not_specialize=["num_pairs", "MOST_TILES", "tile_rows"])
def place_pairs_kernel(
    p_ids, p_counts, p_all, p_first, p_order, p_tiles, p_num_tiles, num_pairs, MOST_TILES, tile_rows,
    E: tl.constexpr, BE: tl.constexpr, OWN: tl.constexpr, READ: tl.constexpr, LOOK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): each places OWN pairs, and describes some tiles. Without p_counts it counts READ ids at
    a time, without p_all it adds up those of READ programs at a time; p_first [programs, BE] is for itself. BE > E:
    pairs routed nowhere come last."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    o_e = tl.arange(0, BE)
    b_all = tl.zeros([BE], dtype=tl.int32)
    b_before = tl.zeros([BE], dtype=tl.int32)
    if p_all is not None:
        b_all += tl.load(p_all + o_e)
        b_before += tl.load(p_counts + i * BE + o_e)
    elif p_counts is not None:
        for start in range(0, tl.num_programs(0), READ):
            o_p = start + tl.arange(0, READ)[:, None]
            b_count = tl.load(p_counts + o_p * BE + o_e[None, :], mask=o_p < tl.num_programs(0), other=0)
            b_all += tl.sum(b_count, 0)
            b_before += tl.sum(tl.where(o_p < i, b_count, 0), 0)
    else:
        for start in range(0, num_pairs, READ):
            o_p = start + tl.arange(0, READ)
            b_ids = tl.load(p_ids + o_p, mask=o_p < num_pairs, other=-1)
            b_ids = tl.where(b_ids < 0, E, b_ids)
            b_all += tl.histogram(b_ids, BE)
            b_before += tl.histogram(tl.where(o_p < i * OWN, b_ids, E), BE)
    b_all = tl.where(o_e < E, b_all, 0)
    b_first = tl.cumsum(b_all, 0) - b_all
    tl.store(p_first + i * BE + o_e, b_first + b_before)
    # Its share of the tiles.
    b_tiles = (b_all + tile_rows - 1) // tile_rows
    b_end = tl.cumsum(b_tiles, 0)
    for j in range(i, tl.max(b_tiles, 0), tl.num_programs(0)):  # the j-th tile of every expert that has one
        o_t, m_t = b_end - b_tiles + j, j < b_tiles
        tl.store(p_tiles + o_t, o_e, mask=m_t)
        tl.store(p_tiles + MOST_TILES + o_t, b_first + j * tile_rows, mask=m_t)
        tl.store(p_tiles + 2 * MOST_TILES + o_t, tl.minimum(b_all - j * tile_rows, tile_rows), mask=m_t)
    if i == 0:
        tl.store(p_num_tiles, tl.sum(b_tiles, 0))
    # Its pairs: after those before it, a pair comes where the program's own of the same expert leave it.
    o = i * OWN + tl.arange(0, OWN)
    b_own = tl.load(p_ids + o, mask=o < num_pairs, other=-1)
    b_rank = tl.zeros([OWN], dtype=tl.int32)
    for start in range(i * OWN, (i + 1) * OWN, LOOK):
        o_p = start + tl.arange(0, LOOK)
        b_ids = tl.load(p_ids + o_p, mask=o_p < num_pairs, other=-1)
        m_earlier = (b_own[:, None] == b_ids[None, :]) & (o_p[None, :] < o[:, None])
        b_rank += tl.sum(m_earlier.to(tl.int32), 1)
    tl.debug_barrier()  # p_first is written
    b_place = tl.load(p_first + i * BE + b_own, mask=b_own >= 0, other=0) + b_rank
    tl.store(p_order + b_place, o, mask=b_own >= 0)


def sort_pairs(
    ids: torch.Tensor,
    num_experts: int,
    tile_rows: int,
    most_at_once: int = MOST_AT_ONCE,
    most_counted: int = MOST_COUNTED,
) -> SortedPairs:
    """ids int32 [T, K], -1: nowhere; tiles of at most `tile_rows` pairs of one expert."""
    num_pairs, device = ids.numel(), ids.device
    assert num_pairs > 0
    assert ids.is_contiguous()
    most = cdiv(num_pairs, tile_rows) + min(num_experts, num_pairs)
    is_counted, is_added_up = num_pairs > most_at_once, num_pairs > most_counted
    width = next_power_of_2(num_experts + 1)
    own, look = (256, 16) if is_added_up else (128, 32)  # that a program places, and compares with each at a time
    programs = cdiv(num_pairs, own)
    new = partial(torch.empty, dtype=torch.int32, device=device)
    order, tiles, num_tiles, first = new(num_pairs), new(3, most), new(1), new(programs, width)
    counts, total = new(programs, width) if is_counted else None, new(width) if is_added_up else None
    if is_counted:
        count_pairs_kernel[(programs,)](
            ids, counts, num_pairs, E=num_experts, BE=width, OWN=own, num_warps=4, **early_launch(device)
        )  # fmt: skip
    if is_added_up:
        experts = min(_EXPERTS, width)
        add_counts_kernel[(width // experts,)](
            counts, total, programs, BE=width, EXPERTS=experts, READ=_MANY_COUNTS, num_warps=4, **early_launch(device)
        )  # fmt: skip
    place_pairs_kernel[(programs,)](
        ids, counts, total, first, order, tiles, num_tiles, num_pairs, most, tile_rows, E=num_experts, BE=width,
        OWN=own, READ=_COUNTS if is_counted else _IDS, LOOK=look,
        num_warps=4 if is_counted and not is_added_up else 8, **early_launch(device),
    )  # fmt: skip
    return SortedPairs(order, tiles, num_tiles, tile_rows)
