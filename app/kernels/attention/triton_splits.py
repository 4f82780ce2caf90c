# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Cuts contexts for split-KV decode, and lists all splits of a step, on the device.

A request's context is cut by its own length alone, never by the batch around it (I6): up to MAX_SPLITS splits of at
least SPLIT_KEYS positions; smaller ones where a request is alone, in 16 bits (triton_rotated.py). The list lets a fixed
number of programs share out any mix of lengths, so that a captured graph serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.launch import multiprocessors
from app.kernels.quick_launch import quick_launch

MAX_SPLITS = 64
SPLIT_KEYS = 256
_LIST_TILE = 256
# Programs of a listed launch, for each multiprocessor. Four run at once, but the device hands out the next one as soon
# as one ends, which a program that goes on to its next split cannot match; too many of nothing to do cost time as well.
_PROGRAMS_PER_SM = 32


@dataclass(slots=True, frozen=True)
class SplitList:
    """The splits of a step's decodes."""

    items: torch.Tensor  # int64 [Rd * most splits], as of `pack_item`; the first `count` entries
    count: torch.Tensor  # int32 [1]


@triton.jit
def cut_context(
    b_len, window, BN: tl.constexpr, USE_WINDOW: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr
):
    """(first visible position, start of the first split, positions per split) of a context of b_len positions."""
    lo = 0
    if USE_WINDOW:
        lo = tl.maximum(b_len - window, 0)
    start = lo // BN * BN
    num_splits = tl.minimum(tl.cdiv(b_len - start, SPLIT_KEYS), MAX_SPLITS)
    split = tl.cdiv(tl.cdiv(b_len - start, num_splits), BN) * BN
    return lo, start, split


@triton.jit
def pack_item(i_r, i_split, b_len, MAX_SPLITS: tl.constexpr):
    """int64: all that a program must know of a split, in one load."""
    return (b_len.to(tl.int64) << 32) | (i_r * MAX_SPLITS + i_split)


@triton.jit
def unpack_item(item, MAX_SPLITS: tl.constexpr):
    """int32 (request, split, positions of the request's context)."""
    low = item.to(tl.int32)
    return low // MAX_SPLITS, low % MAX_SPLITS, (item >> 32).to(tl.int32)


@quick_launch
@triton.jit(do_not_specialize=["window", "R"])
def list_kernel(
    p_seq_lens,
    p_items,
    p_count,
    window,
    R,
    BR: tl.constexpr,
    BN: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """Grid (1,): the splits of requests [0, R), request by request."""
    total = 0
    for i_r in range(0, R, BR):
        o_r = i_r + tl.arange(0, BR)
        m_r = o_r < R
        b_len = tl.load(p_seq_lens + o_r, mask=m_r, other=1)
        _, start, split = cut_context(b_len, window, BN, USE_WINDOW, MAX_SPLITS, SPLIT_KEYS)
        b_splits = tl.where(m_r, tl.cdiv(b_len - start, split), 0)
        o_first = total + tl.cumsum(b_splits, 0) - b_splits
        for i_split in range(0, tl.max(b_splits, 0)):
            b_items = pack_item(o_r, i_split, b_len, MAX_SPLITS)
            tl.store(p_items + o_first + i_split, b_items, mask=i_split < b_splits)
        total += tl.sum(b_splits, 0)
    tl.store(p_count, total)


def most_splits(max_seq_len: int) -> int:
    """The most splits that a context of so many positions is cut into."""
    return min(MAX_SPLITS, max(1, -(-max_seq_len // SPLIT_KEYS)))


def list_splits(seq_lens: torch.Tensor, max_splits: int, tile_keys: int, sliding_window: int | None) -> SplitList:
    """The splits of contexts int32 [Rd], each of at least one position; one small launch."""
    num_decodes = seq_lens.shape[0]
    made = SplitList(
        items=torch.empty(num_decodes * max_splits, dtype=torch.int64, device=seq_lens.device),
        count=torch.empty(1, dtype=torch.int32, device=seq_lens.device),
    )
    list_kernel[(1,)](
        seq_lens,
        made.items,
        made.count,
        sliding_window or 0,
        num_decodes,
        BR=_LIST_TILE,
        BN=tile_keys,
        USE_WINDOW=sliding_window is not None,
        MAX_SPLITS=MAX_SPLITS,
        SPLIT_KEYS=SPLIT_KEYS,
        num_warps=4,
    )
    return made


def programs_for(made: SplitList, num_kv_heads: int) -> int:
    """Programs that share out the list, for each KV head: a fixed number for a shape."""
    sms = multiprocessors(made.items.device)
    return min(made.items.shape[0], max(1, _PROGRAMS_PER_SM * sms // num_kv_heads))
