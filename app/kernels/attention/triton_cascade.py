# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Shared-prefix decode: splits that several requests share are read once for all of them.

Known as cascade attention (Ye et al., FlashInfer, 2024) and Hydragen (Juravsky et al., 2024).

The splits are those of split-KV decode (triton_decode.py), which serves those that only one request reads. Here a
program attends one KV head's query heads of up to `group_slots` requests over a run of shared splits, and leaves their
partial results where the merge looks for them: that of the whole run at its first split, nothing at the others. The
order of additions differs from that of the other kernel, the result by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.attention import AttentionMetadata, AttentionOptions
from app.kernels.attention.triton_quantize import query_to_fp8_keys
from app.kernels.attention.triton_shared_splits import RUN_WORDS, SharedSplits
from app.kernels.attention.triton_tile import NO_MAX, attend_tile, head_columns
from app.kernels.launch import multiprocessors, next_power_of_2
from app.kernels.quick_launch import quick_launch

# Programs of a launch, for each multiprocessor: as many as run at once, and a second round to even the ends out.
_PROGRAMS_PER_SM = 4


@dataclass(slots=True, frozen=True)
class CascadeTile:
    """Tile sizes and launch options of the kernel."""

    rows: int  # (request, query head of one KV head) pairs
    keys: int  # at most those of the decode kernel, which a split is a multiple of
    run: int  # splits that one partial result covers at most: fewer to write and merge, but fewer programs too
    num_warps: int
    num_stages: int


def choose_cascade_tile(num_rows: int, head_dim: int, dtype: torch.dtype) -> CascadeTile:
    """A table by the bytes of a key, as the decode kernel's, and by the rows there would be if all requests were one
    group. fp32 products are not the tensor cores' and want small tiles."""
    key_bytes = next_power_of_2(head_dim) * dtype.itemsize
    if dtype == torch.float32:
        return CascadeTile(rows=32 if key_bytes <= 512 else 16, keys=32, run=2, num_warps=4, num_stages=2)
    if key_bytes > 256:
        return CascadeTile(rows=64, keys=32, run=2, num_warps=8, num_stages=2)
    # Longer runs where there are groups enough to keep every multiprocessor busy: fewer partial results to merge.
    run = 1 if num_rows <= 64 else 2 if num_rows <= 128 else 4
    return CascadeTile(rows=64, keys=64, run=run, num_warps=4, num_stages=3)


def group_slots_of(tile: CascadeTile, group: int) -> int:
    """Requests that a program serves at most, where a KV head has `group` query heads; 1: there is nothing to win."""
    return max(1, tile.rows // group)


@quick_launch
@triton.jit(do_not_specialize=["stride_table", "stride_split"])
def cascade_kernel(
    p_q, p_cache, p_scales, p_partial, p_log_sum, p_tables, p_runs, p_members, p_count,
    scale, soft_cap,
    stride_q_token, stride_q_head, stride_block, stride_value, stride_head, stride_slot, stride_table, stride_split,
    G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    GROUP_SLOTS: tl.constexpr, RUN_WORDS: tl.constexpr, USE_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (any number, Hkv), which share out the runs. Every member sees every position: no mask."""
    i_head = tl.program_id(1)
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    o_head = i_head * G + o_m % G
    p_head = p_cache + i_head * stride_head
    if p_scales is not None:
        scale = scale * tl.load(p_scales + i_head)
    for i_run in range(tl.program_id(0), tl.load(p_count), tl.num_programs(0)):
        # All at once, not one after another: group slots that nobody has hold any number, and are masked below.
        p_words, p_member = p_runs + i_run * RUN_WORDS, p_members + i_run * GROUP_SLOTS
        i_split, i_end = tl.load(p_words), tl.load(p_words + 1)
        split, num_members = tl.load(p_words + 2), tl.load(p_words + 3)
        i_first = tl.load(p_member).to(tl.int64)
        b_row = tl.load(p_member + o_m // G, mask=o_m // G < GROUP_SLOTS, other=0).to(tl.int64)
        m_m = o_m < num_members * G
        begin, end = i_split * split, i_end * split
        m_q = m_m[:, None] & (o_d[None, :] < D)
        p_query = p_q + b_row[:, None] * stride_q_token + o_head[:, None] * stride_q_head + o_d[None, :]
        b_q = tl.load(p_query, mask=m_q, other=0.0)
        if p_scales is not None:
            b_q = query_to_fp8_keys(b_q)
        b_acc = tl.zeros([BM, BD], dtype=tl.float32)
        b_sum = tl.zeros([BM], dtype=tl.float32)
        b_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
        p_table = p_tables + i_first * stride_table
        for i_n in range(begin, end, BN):
            b_acc, b_sum, b_max = attend_tile(
                b_q, b_acc, b_sum, b_max, p_head, p_table, i_n, begin, end, o_m, scale, soft_cap, 0, None, None, 0,
                stride_block, stride_value, stride_slot, D, S, BN, BD, False, False, USE_CAP, PRECISION,
            )  # fmt: skip
        o_part = (b_row * tl.num_programs(1) * G + o_head) * stride_split + i_split
        b_out = b_acc / b_sum[:, None]
        if p_scales is not None:
            b_out = b_out * tl.load(p_scales + tl.num_programs(1) + i_head)
        tl.store(p_partial + o_part[:, None] * D + o_d[None, :], b_out, mask=m_q)
        tl.store(p_log_sum + o_part, b_max + tl.log2(b_sum), mask=m_m)
        for i_rest in range(1, i_end - i_split):
            tl.store(p_log_sum + o_part + i_rest, tl.zeros([BM], dtype=tl.float32) + NO_MAX, mask=m_m)


def attend_runs(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    shared: SharedSplits,
    results: tuple[torch.Tensor, torch.Tensor],
    options: AttentionOptions,
    *,
    tile_keys: int,
    tile: CascadeTile,
) -> None:
    """Partial results of the shared splits, into `results`: partial [Rd, Hq, splits, D] and log_sum [Rd, Hq, splits].

    `tile_keys`: those of the decode kernel, by which the contexts were cut.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    programs = min(shared.runs.shape[0], max(1, _PROGRAMS_PER_SM * multiprocessors(query.device) // num_kv_heads))
    cascade_kernel[(programs, num_kv_heads)](
        query, kv_cache, options.kv_scales, *results, meta.block_table, shared.runs, shared.members, shared.count,
        options.scale, options.soft_cap or 1.0,
        query.stride(0), query.stride(1), *kv_cache.stride()[:4], meta.block_table.stride(0), results[1].shape[2],
        G=num_heads // num_kv_heads,
        D=head_dim,
        S=block_size,
        BM=tile.rows,
        BN=min(tile.keys, tile_keys),
        BD=head_columns(head_dim),
        GROUP_SLOTS=shared.members.shape[1],
        RUN_WORDS=RUN_WORDS,
        USE_CAP=options.soft_cap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
