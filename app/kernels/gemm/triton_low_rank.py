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

TILE_RANK = 16
MOST_PARTS = 4
_MOST_RANKS = 128  # that are multiplied at a time


@dataclass(slots=True, frozen=True)
class LowRankRows:
    """The halves of T rows' low-rank products, each row with the matrices of its slot."""

    hidden: torch.Tensor  # [T, P, tiles * TILE_RANK]: of each part of the outputs
    slots: torch.Tensor  # int32 [T]; negative: the row gets nothing
    present: torch.Tensor  # int32 [1 + S]: how many slots rows have, and these
    second: torch.Tensor  # [S, tiles, N, TILE_RANK]
    num_tiles: torch.Tensor  # int32 [S] that are filled
    part_sizes: tuple[int, ...]  # outputs of each of P parts, MOST_PARTS at most


@triton.jit
def add_low_rank(
    b_acc, o_m, o_n, m_n, i_out, T, p_hidden, p_slots, p_present, p_second, p_num_tiles, stride_slot, stride_tile,
    end_0, end_1, end_2,
    PARTS: tl.constexpr, RANKS: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """fp32 [BM, BN] + the low-rank products of rows o_m in the outputs o_n, which are of one part, the one of output
    i_out; rows without a slot keep their bits."""
    b_slot = tl.load(p_slots + o_m, mask=o_m < T, other=-1)
    i_part = (i_out >= end_0).to(tl.int32) + (i_out >= end_1).to(tl.int32) + (i_out >= end_2).to(tl.int32)
    b_more = tl.zeros_like(b_acc)
    for i in range(0, tl.load(p_present)):
        slot = tl.load(p_present + 1 + i)
        ranks = tl.load(p_num_tiles + slot) * 16
        p_matrix = p_second + slot.to(tl.int64) * stride_slot
        m_m = (b_slot == slot)[:, None]
        for i_r in tl.static_range(0, RANKS, BR):
            o_r = i_r + tl.arange(0, BR)[None, :]
            p_h = p_hidden + (o_m[:, None] * PARTS + i_part) * RANKS + o_r
            p_b = p_matrix + (o_r // 16) * stride_tile + o_n[:, None] * 16 + o_r % 16
            b_h = tl.load(p_h, mask=m_m & (o_r < ranks), other=0.0)
            b_b = tl.load(p_b, mask=m_n[:, None] & (o_r < ranks), other=0.0)
            b_more = tl.dot(b_h, tl.trans(b_b), b_more, input_precision=PRECISION)
    return tl.where((b_slot >= 0)[:, None], b_acc + b_more, b_acc)


def arguments(rows: LowRankRows | None) -> tuple[torch.Tensor | int | None, ...]:
    """What the kernels are given of it, in their order."""
    if rows is None:
        return (*(None,) * 5, *(0,) * 5)
    tensors = rows.hidden, rows.slots, rows.present, rows.second, rows.num_tiles
    ends = list(accumulate(rows.part_sizes))
    ends += ends[-1:] * (MOST_PARTS - len(ends))
    return (*tensors, rows.second.stride(0), rows.second.stride(1), *ends[:-1])


def constants(rows: LowRankRows | None) -> dict[str, int]:
    """What the kernels are compiled for of it."""
    if rows is None:
        return {"PARTS": 1, "RANKS": TILE_RANK, "BR": TILE_RANK}
    _, parts, ranks = rows.hidden.shape
    size = TILE_RANK
    while 2 * size <= _MOST_RANKS and size < ranks:
        size *= 2
    return {"PARTS": parts, "RANKS": ranks, "BR": size}
