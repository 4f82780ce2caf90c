# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Low-rank products that a product of few rows adds to its rows before it writes them: the second half of an adapter's,
in the base product's own launch.

The first half, `hidden`, is a launch just before (kernels/lora), which lets the next one begin at once: the base
product reads its weight meanwhile, and waits for `hidden` only when it is done with that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from app.kernels.launch import next_power_of_2

TILE_RANK = 16
MOST_PARTS = 4
_MOST_RANKS = {32: 128, 64: 64}  # that are multiplied at a time, by rows: as many as there are registers for


@dataclass(slots=True, frozen=True)
class LowRankRows:
    """The halves of T rows' low-rank products, each row with the matrices of its slot."""

    hidden: torch.Tensor  # [T, P, tiles * TILE_RANK]: of each part of the outputs
    slots: torch.Tensor  # int32 [T]; negative: the row gets nothing
    jobs: torch.Tensor  # int32 [2 J + 1]: the slot (-1: no job), then the tile of each job; how many jobs there are
    second: torch.Tensor  # [S, tiles, N, TILE_RANK]
    part_sizes: tuple[int, ...]  # outputs of each of P parts, MOST_PARTS at most


@triton.jit
def first_jobs(o_m, T, p_slots, p_jobs, num_jobs, BR: tl.constexpr):
    """Ask for the number of jobs, the slots of rows o_m, slots and tiles of the first jobs: before the product,
    so that they are there behind it."""
    b_row = tl.load(p_slots + o_m, mask=o_m < T, other=-1)
    o_j = tl.arange(0, BR) // 16
    return tl.load(p_jobs + 2 * num_jobs), b_row, tl.load(p_jobs + o_j), tl.load(p_jobs + num_jobs + o_j)


@triton.jit
def add_low_rank(
    b_acc, o_m, o_n, m_n, i_out, count, b_row, b_slot, b_tile, p_hidden, p_jobs, num_jobs, p_second, stride_slot,
    stride_tile, end_0, end_1, end_2, PARTS: tl.constexpr, RANKS: tl.constexpr, BR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN] + the low-rank products of rows o_m in the outputs o_n, which are of one part, the one of output
    i_out; rows without a slot keep their bits. Some jobs at a time, the first ones as `first_jobs` found them: in each,
    the rows of other slots are zero."""
    i_part = (i_out >= end_0).to(tl.int32) + (i_out >= end_1).to(tl.int32) + (i_out >= end_2).to(tl.int32)
    o_r = tl.arange(0, BR)
    b_more = tl.zeros_like(b_acc)
    for i_j in tl.range(0, count, BR // 16, num_stages=1):
        p_h = p_hidden + (o_m[:, None] * PARTS + i_part) * RANKS + (b_tile * 16 + o_r % 16)[None, :]
        o_b = b_slot.to(tl.int64) * stride_slot + b_tile * stride_tile + o_r % 16
        m_r = (b_slot >= 0)[None, :]
        b_h = tl.load(p_h, mask=(b_row[:, None] == b_slot[None, :]) & m_r, other=0.0)
        b_b = tl.load(p_second + o_n[:, None] * 16 + o_b[None, :], mask=m_n[:, None] & m_r, other=0.0)
        o_j = i_j + BR // 16 + o_r // 16  # the next ones are on their way with the operands
        b_slot = tl.load(p_jobs + o_j, mask=o_j < num_jobs, other=-1)
        b_tile = tl.load(p_jobs + num_jobs + o_j, mask=o_j < num_jobs, other=0)
        b_more = tl.dot(b_h, tl.trans(b_b), b_more, input_precision=PRECISION)
    return tl.where((b_row >= 0)[:, None], b_acc + b_more, b_acc)


def arguments(rows: LowRankRows | None) -> tuple[torch.Tensor | int | None, ...]:
    """Returns the arguments that kernels take of it, in their order."""
    if rows is None:
        return (None, None, None, 0, None, *(0,) * 5)
    ends = list(accumulate(rows.part_sizes))
    ends += ends[-1:] * (MOST_PARTS - len(ends))
    num_jobs, second = len(rows.jobs) // 2, rows.second
    return (rows.hidden, rows.slots, rows.jobs, num_jobs, second, second.stride(0), second.stride(1), *ends[:-1])


def constants(rows: LowRankRows | None) -> dict[str, int]:
    """Returns the constants that kernels are compiled for."""
    if rows is None:
        return {"PARTS": 1, "RANKS": TILE_RANK, "BR": TILE_RANK}
    num_rows, parts, ranks = rows.hidden.shape
    most = _MOST_RANKS[32 if num_rows <= 32 else 64]
    return {"PARTS": parts, "RANKS": ranks, "BR": ranks_at_a_time(num_rows, len(rows.second), ranks, most)}


def ranks_at_a_time(num_rows: int, num_slots: int, ranks: int, most: int) -> int:
    """Ranks of all jobs that there can be, as a power of two of at least a tile's, or `most`."""
    return min(most, max(TILE_RANK, next_power_of_2(min(num_rows, num_slots) * ranks)))
