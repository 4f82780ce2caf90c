# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Finds on the device, once a step, which splits of its decodes hold the same keys and values.

A block belongs to the chain of all tokens before its end (I5), so requests whose tables hold the same block at the
same place share everything up to there. Two requests share their first n splits where both are cut alike and the
blocks in which these splits end are the same. `depth_kernel` counts n for every pair; because sharing is nested, all
else follows from that table: who reads a split together, and over how many splits these stay the same. Requests of
one group are taken in the order of the batch, and a group is served from its first one's table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.attention import AttentionMetadata, triton_splits
from app.kernels.attention.triton_splits import SplitList, cut_context, pack_item
from app.kernels.launch import cdiv, next_power_of_2
from app.kernels.quick_launch import quick_launch

RUN_WORDS = 4  # first split, one past the last, positions of a split, members
_DEPTH_TILE = 64
# One compiled kernel serves every batch of up to so many requests.
_GROUP_TILE = 256
_GROUP_ELEMENTS = 4096


@dataclass(slots=True, frozen=True)
class SharedSplits:
    """The step's splits, each either in `singles` or, for a group of requests, in one run."""

    singles: SplitList
    runs: torch.Tensor  # int32 [most runs, RUN_WORDS]
    members: torch.Tensor  # int32 [most runs, slots]: requests, ascending; the first lends its block table
    count: torch.Tensor  # int32 [1], runs


@quick_launch
@triton.jit(do_not_specialize=["R", "stride_table"])
def depth_kernel(
    p_tables,
    p_seq_lens,
    p_depth,
    R,
    stride_table,
    S: tl.constexpr,
    BC: tl.constexpr,
    BJ: tl.constexpr,
    BN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """Grid (R, tiles of BC requests): depth[r, c] = leading whole splits that r and c share; [r, r] all that r has.

    A request's last split is never whole: it grows, and the step's own token is in it.
    """
    i_r = tl.program_id(0)
    o_c = tl.program_id(1) * BC + tl.arange(0, BC)
    o_j = tl.arange(0, BJ)
    b_len = tl.load(p_seq_lens + i_r)
    b_lens = tl.load(p_seq_lens + o_c, mask=o_c < R, other=1)
    _, _, split = cut_context(b_len, 0, BN, False, MAX_SPLITS, SPLIT_KEYS)
    _, _, b_splits = cut_context(b_lens, 0, BN, False, MAX_SPLITS, SPLIT_KEYS)
    b_whole = tl.where(b_splits == split, tl.minimum(b_len - 1, b_lens - 1) // split, 0)
    o_block = ((o_j + 1) * split - 1) // S
    p_mine = p_tables + i_r.to(tl.int64) * stride_table + o_block
    b_mine = tl.load(p_mine, mask=o_j < (b_len - 1) // split, other=-1)
    m_whole = o_j[None, :] < b_whole[:, None]
    p_theirs = p_tables + o_c.to(tl.int64)[:, None] * stride_table + o_block[None, :]
    b_theirs = tl.load(p_theirs, mask=m_whole, other=-1)
    b_first = tl.where(m_whole & (b_theirs == b_mine[None, :]), BJ, o_j[None, :])
    tl.store(p_depth + i_r.to(tl.int64) * R + o_c, tl.min(b_first, 1), mask=o_c < R)


@quick_launch
@triton.jit(do_not_specialize=["R"])
def group_kernel(
    p_depth,
    p_seq_lens,
    p_singles,
    p_runs,
    p_members,
    p_counts,
    R,
    GROUP_SLOTS: tl.constexpr,
    RUN: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    BR: tl.constexpr,
    BJ: tl.constexpr,
    BN: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """Grid (R,): list request r's splits that it reads alone, and the runs of those groups of which it is the first.

    A group of more than GROUP_SLOTS requests is served as several. A run covers splits of the same group from one
    multiple of RUN to the next at most. Where in the lists an entry comes is left to chance: each is computed by
    itself.
    """
    i_r = tl.program_id(0)
    o_c = tl.arange(0, BR)
    b_len = tl.load(p_seq_lens + i_r)
    _, _, split = cut_context(b_len, 0, BN, False, MAX_SPLITS, SPLIT_KEYS)
    num_splits = tl.cdiv(b_len, split)
    b_depth = tl.load(p_depth + i_r.to(tl.int64) * R + o_c, mask=o_c < R, other=0)[None, :]
    for i_j in range(0, num_splits, BJ):
        o_j = i_j + tl.arange(0, BJ)
        m_with = b_depth > o_j[:, None]  # [BJ, BR], who shares split j
        m_after = m_with & (o_c >= i_r)[None, :]
        b_after = tl.sum(m_after.to(tl.int32), 1)
        b_rank = tl.sum(m_with.to(tl.int32), 1) - b_after
        b_count = tl.where(b_rank % GROUP_SLOTS == 0, tl.minimum(b_after, GROUP_SLOTS), -1)  # -1: served by another
        m_single = (o_j < num_splits) & ((b_count == 0) | (b_count == 1))  # 0: the split is not whole
        b_left = tl.sum((b_depth == o_j[:, None]).to(tl.int32), 1)  # who shared split j - 1, but not j
        m_run = (b_count > 1) & ((o_j % RUN == 0) | (b_left > 0))
        b_end = tl.min(tl.where(m_with, b_depth, MAX_SPLITS), 1)
        b_end = tl.minimum(b_end, (o_j // RUN + 1) * RUN)

        b_single = m_single.to(tl.int32)
        o_single = tl.atomic_add(p_counts, tl.sum(b_single, 0)) + tl.cumsum(b_single, 0) - 1
        tl.store(p_singles + o_single, pack_item(i_r, o_j, b_len, MAX_SPLITS), mask=m_single)
        b_run = m_run.to(tl.int32)
        o_run = tl.atomic_add(p_counts + 1, tl.sum(b_run, 0)) + tl.cumsum(b_run, 0) - 1
        p_words = p_runs + o_run * RUN_WORDS
        tl.store(p_words, o_j, mask=m_run)
        tl.store(p_words + 1, b_end, mask=m_run)
        tl.store(p_words + 2, split, mask=m_run)
        tl.store(p_words + 3, b_count, mask=m_run)
        o_slot = tl.cumsum(m_after.to(tl.int32), 1) - 1
        b_member = tl.zeros([BJ, BR], dtype=tl.int32) + o_c[None, :]
        tl.store(
            p_members + o_run[:, None] * GROUP_SLOTS + o_slot,
            b_member,
            mask=m_run[:, None] & m_after & (o_slot < GROUP_SLOTS),
        )


def share_splits(
    meta: AttentionMetadata, max_splits: int, tile_keys: int, block_size: int, group_slots: int, run: int
) -> SharedSplits:
    """The splits of the decodes of `meta`, cut by tiles of `tile_keys`; groups of at most `group_slots`. Two
    launches."""
    num_decodes, device = meta.num_decodes, meta.seq_lens.device
    most_runs = max(1, num_decodes // 2) * max_splits
    depth, runs, members = (
        torch.empty(shape, dtype=torch.int32, device=device)
        for shape in ((num_decodes, num_decodes), (most_runs, RUN_WORDS), (most_runs, group_slots))
    )
    singles = torch.empty(num_decodes * max_splits, dtype=torch.int64, device=device)
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    cut = {"BN": tile_keys, "MAX_SPLITS": triton_splits.MAX_SPLITS, "SPLIT_KEYS": triton_splits.SPLIT_KEYS}
    depth_kernel[(num_decodes, cdiv(num_decodes, _DEPTH_TILE))](
        meta.block_table, meta.seq_lens, depth, num_decodes, meta.block_table.stride(0),
        S=block_size, BC=_DEPTH_TILE, BJ=triton_splits.MAX_SPLITS, num_warps=4, **cut,
    )  # fmt: skip
    requests = max(_GROUP_TILE, next_power_of_2(num_decodes))
    group_kernel[(num_decodes,)](
        depth, meta.seq_lens, singles, runs, members, counts, num_decodes,
        GROUP_SLOTS=group_slots, RUN=run, RUN_WORDS=RUN_WORDS, BR=requests,
        BJ=max(1, _GROUP_ELEMENTS // requests), num_warps=4, **cut,
    )  # fmt: skip
    return SharedSplits(SplitList(singles, counts[:1]), runs, members, counts[1:])
