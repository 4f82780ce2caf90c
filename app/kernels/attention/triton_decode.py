# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
"""Split-KV decode (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023) of requests with one query token, or with the
same few, the last of their contexts.

A program attends one KV head's query heads, of all of a request's Q queries, over one split.

A request's context is cut by its own length alone (triton_splits.py). Splits leave normalised partial results and
their log-sum-exp; the program that finishes the last of a request's splits merges them, in a fixed order whoever that
is. Of a request with one split it writes the output itself. Programs are either one for each split that the longest
request could have, or, where the step is static, a fixed number that share out a list of the splits there are: the same
bits. Where the metadata asks for it, splits that requests share are left to triton_cascade.py, the list holds the
others, and the merge is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.attention import KV_FP8, AttentionMetadata, AttentionOptions, HeadBias, triton_splits
from app.kernels.attention.triton_cascade import CascadeTile, attend_runs, choose_cascade_tile, group_slots_of
from app.kernels.attention.triton_merge import done_before, merge_kernel, merge_splits, places_of, rows_of
from app.kernels.attention.triton_quantize import query_to_fp8_keys
from app.kernels.attention.triton_shared_splits import SharedSplits, share_splits
from app.kernels.attention.triton_splits import (
    SplitList,
    cut_context,
    list_splits,
    most_splits,
    programs_for,
    unpack_item,
)
from app.kernels.attention.triton_tile import NO_MAX, attend_tile, head_columns, weight_of_sink
from app.kernels.attention.triton_tile_fp8 import attend_fp8_tile, joined
from app.kernels.kernel_table import HOPPER, Candidate, Kernel, KernelTable, chosen
from app.kernels.launch import early_launch, next_power_of_2, register_limit
from app.kernels.quick_launch import quick_launch

# Elements of partial results that a merge holds at a time: they take registers, and the merge must not take more
# than the rest of the kernel.
_MERGE_ELEMENTS = 2048
# Programs with one split for each request: with fewer, a multiprocessor has room for more pipeline stages. The bits
# are the same for any number of stages.
_FEW_PROGRAMS = 64
_NO_BIAS = HeadBias()
_ALIGNED = 4  # int32 from one multiple of 16 bytes to the next, where kernels expect tensors to begin


@dataclass(slots=True, frozen=True)
class DecodeTile:
    """Tile sizes and launch options of the decode kernel."""

    keys: int
    num_warps: int
    num_stages: int
    # Most registers of a thread; None: the compiler decides. It spills what it would hold across the loop over keys.
    max_registers: int | None = None


@dataclass(slots=True, frozen=True)
class DecodeCall:
    """A layer's decodes."""

    query: torch.Tensor  # [T, Hq, D]
    kv_cache: torch.Tensor
    meta: AttentionMetadata
    scratch: DecodeScratch
    listed: SplitList | None  # of a static step
    is_shared: bool  # other splits are shared by requests; who merges comes later
    out: torch.Tensor  # [T, Hq, D]
    options: AttentionOptions
    tile: DecodeTile
    each: int  # queries of a request


# It serves a call.
DecodeKernel = Kernel[[DecodeCall], bool, Callable[[DecodeCall], None]]
DECODES: KernelTable[DecodeKernel] = KernelTable(
    "decodes of paged attention",
    Candidate("app.kernels.attention.gluon_decode:KERNEL", HOPPER),
    Candidate("app.kernels.attention.triton_decode:KERNEL"),
)


@dataclass(slots=True)
class DecodeScratch:
    """Holds what the programs of a layer pass to each other; made once a step, used by every layer."""

    num_splits: int  # most of a request
    partial: torch.Tensor  # fp32 [Rd, Hq, num_splits, D], of a list [splits, Hq, D]; empty where num_splits is 1
    log_sum: torch.Tensor  # fp32 [Rd, Hq, num_splits], base 2; likewise
    arrived: torch.Tensor  # int32 [Rd, Hkv], splits that are done; 0 before and after each layer
    turn: torch.Tensor  # int32 [1], whose turn it is of a list; likewise
    kernels: tuple[DecodeKernel, ...]
    # The splits of a static step, by (sliding window, keys of a tile); made by the first layer with them.
    lists: dict[tuple[int | None, int], SplitList] | None = None
    # How the step shares splits, if it may, by (keys of a tile, most requests of a group); made as the lists are.
    shared: dict[tuple[int, int], SharedSplits] | None = None

    def splits(
        self, meta: AttentionMetadata, sliding_window: int | None, tile: DecodeTile, each: int
    ) -> SplitList | None:
        """The list for a layer whose requests have so many queries; None outside of static steps."""
        if self.lists is None:
            return None
        key = (sliding_window, tile.keys)
        if key not in self.lists:
            lens = meta.seq_lens[: meta.num_decodes]
            reach = None if sliding_window is None else sliding_window + each - 1  # of all of a request's queries
            self.lists[key] = list_splits(lens, self.num_splits, tile.keys, reach)
        return self.lists[key]


def choose_tile(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> DecodeTile:
    """A table by the bytes of a key; 256 bytes (bf16, head size 128) were swept on an H200. `kv_dtype`: the cache's, if
    not that of the queries."""
    key_bytes = next_power_of_2(head_dim) * dtype.itemsize
    if kv_dtype == KV_FP8 and dtype.itemsize == 2 and key_bytes <= 256:
        return DecodeTile(keys=128, num_warps=4, num_stages=2, max_registers=168)  # three programs fit
    if key_bytes <= 128:
        return DecodeTile(keys=128, num_warps=4, num_stages=3)
    if key_bytes <= 256:
        return DecodeTile(keys=64, num_warps=4, num_stages=2)
    return DecodeTile(keys=32 if key_bytes <= 512 else 16, num_warps=4, num_stages=2)


def make_scratch(meta: AttentionMetadata, num_heads: int, num_kv_heads: int, head_dim: int) -> DecodeScratch:
    """Scratch for the step's decodes, sized by `meta.max_seq_len` alone: no synchronisation."""
    num_splits = most_splits(meta.max_seq_len)
    num_cut = meta.num_decodes if num_splits > 1 else 0
    shape = (num_cut, num_heads, num_splits)
    device = meta.seq_lens.device
    zeros = torch.zeros(_ALIGNED + num_cut * num_kv_heads, dtype=torch.int32, device=device)
    return DecodeScratch(
        num_splits=num_splits,
        partial=torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
        log_sum=torch.empty(*shape, dtype=torch.float32, device=device),
        arrived=zeros[_ALIGNED:].view(num_cut, num_kv_heads),
        turn=zeros[:1],
        kernels=DECODES.all_on(device),
        lists={} if meta.is_static else None,
        shared={} if meta.cascade and num_splits > 1 and meta.num_decodes > 1 else None,
    )


@triton.jit
def attend_split(
    i_r, i_split, i_first, num_splits, b_len, lo, begin, end,
    p_q, p_cache, p_scales, p_sinks, p_slopes, p_biases, p_out, p_partial, p_log_sum, p_arrived, p_tables,
    scale, soft_cap, window, num_bias,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_block, stride_value, stride_head, stride_slot, stride_table, stride_split,
    G: tl.constexpr, Q: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, MAX_SPLITS: tl.constexpr, USE_WINDOW: tl.constexpr,
    USE_CAP: tl.constexpr,
    MERGE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One KV head's query heads over positions [begin, end) of request i_r, one of its num_splits splits: into p_out,
    or as a partial result (`places_of`), merged with the others if it is the last one to be done (and MERGE). Of
    several queries the first ones may see nothing of the last split."""
    i_head, num_heads = tl.program_id(0), tl.num_programs(0)
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    m_q = (o_m[:, None] < Q * G) & (o_d[None, :] < D)
    o_token, o_head = rows_of(i_r, i_head, o_m, G, Q)
    p_query = p_q + o_token[:, None] * stride_q_token + o_head[:, None] * stride_q_head + o_d[None, :]
    b_q = tl.load(p_query, mask=m_q, other=0.0)
    o_pos = tl.zeros([BM], dtype=tl.int32) + (b_len - 1)
    if Q > 1:
        o_pos = b_len - Q + o_m // G
    b_acc = tl.zeros([BM, BD], dtype=tl.float32)
    b_sum = tl.zeros([BM], dtype=tl.float32)
    b_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
    b_slope = None
    if p_slopes is not None:
        b_slope = tl.load(p_slopes + o_head, mask=o_m < Q * G, other=0.0)
    p_bias = None
    if p_biases is not None:
        p_bias = p_biases + tl.minimum(o_head, i_head * G + G - 1) * num_bias
    p_head = p_cache + i_head * stride_head
    p_table = p_tables + i_r.to(tl.int64) * stride_table
    if p_scales is not None:
        scale = scale * tl.load(p_scales + i_head)
        b_q = query_to_fp8_keys(b_q)
        b_even = tl.zeros([BM, BD // 2], dtype=tl.float32)
        b_odd = tl.zeros([BM, BD // 2], dtype=tl.float32)
        for i_n in range(begin, end, BN):
            b_even, b_odd, b_sum, b_max = attend_fp8_tile(
                b_q, b_even, b_odd, b_sum, b_max, p_head, p_table, i_n, lo, end, o_pos, scale, soft_cap, window,
                b_slope, p_bias, num_bias,
                stride_block, stride_value, stride_slot, D, S, BN, BD, USE_WINDOW, USE_CAP, PRECISION,
            )  # fmt: skip
        b_acc = joined(b_even, b_odd, BM, BD) * tl.load(p_scales + num_heads + i_head)
    else:
        for i_n in range(begin, end, BN):
            b_acc, b_sum, b_max = attend_tile(
                b_q, b_acc, b_sum, b_max, p_head, p_table, i_n, lo, end, o_pos, scale, soft_cap, window, b_slope,
                p_bias, num_bias,
                stride_block, stride_value, stride_slot, D, S, BN, BD, True, USE_WINDOW, USE_CAP, PRECISION,
            )  # fmt: skip
    if num_splits == 1:
        if p_sinks is not None:
            b_sum += weight_of_sink(tl.load(p_sinks + o_head, mask=o_m < Q * G, other=0.0), b_max)
        b_out = b_acc / b_sum[:, None]
        p_o = p_out + o_token[:, None] * stride_out_token + o_head[:, None] * stride_out_head + o_d[None, :]
        tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_q)
    else:
        if Q > 1:
            b_sum = tl.where(b_max > NO_MAX, b_sum, 1.0)  # what saw nothing weighs nothing
        b_out = b_acc / b_sum[:, None]
        first, stride_row, stride_next = places_of(i_r, i_head, num_heads, i_first, stride_split, G, Q, PACKED)
        o_part = first + o_m * stride_row + i_split * stride_next
        tl.store(p_partial + o_part[:, None] * D + o_d[None, :], b_out, mask=m_q)
        tl.store(p_log_sum + o_part, b_max + tl.log2(b_sum), mask=o_m < Q * G)
        if MERGE:
            p_count = p_arrived + i_r * num_heads + i_head
            if done_before(p_count) == num_splits - 1:
                merge_splits(
                    i_r, i_head, first, num_splits, p_partial, p_log_sum, p_sinks, p_out,
                    stride_out_token, stride_out_head, stride_row, stride_next, G, Q, BG, D, BD, BS, MAX_SPLITS, False,
                )  # fmt: skip
                tl.store(p_count, 0)  # for the next layer


@quick_launch
@triton.jit(do_not_specialize=["window", "stride_table", "stride_split"])
def decode_kernel(
    p_q, p_cache, p_scales, p_sinks, p_slopes, p_biases, p_out, p_partial, p_log_sum, p_arrived, p_tables,
    p_seq_lens, p_items, p_count,
    scale, soft_cap, window, num_bias,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_block, stride_value, stride_head, stride_slot, stride_table, stride_split,
    G: tl.constexpr, Q: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    USE_CAP: tl.constexpr, USE_LIST: tl.constexpr, MERGE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv, splits of the longest request, Rd); with a list of splits (Hkv, any number), which share it out. The
    heads come first: those of a block lie side by side in memory, and are read at about the same time."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if USE_LIST:
        # Entries are loaded ahead: the first along with their number, each next one before the work on this one.
        stride = tl.num_programs(1)
        item = tl.load(p_items + tl.program_id(1))
        count = tl.load(p_count)
        for i_item in range(tl.program_id(1), count, stride):
            next_item = tl.load(p_items + i_item + stride, mask=i_item + stride < count, other=0)
            i_r, i_split, b_len = unpack_item(item, MAX_SPLITS)
            lo, start, split = cut_context(b_len, window + Q - 1, BN, USE_WINDOW, MAX_SPLITS, SPLIT_KEYS)
            begin = start + i_split * split
            end = tl.minimum(begin + split, b_len)
            attend_split(
                i_r, i_split, i_item - i_split, tl.cdiv(b_len - start, split), b_len, lo, begin, end,
                p_q, p_cache, p_scales, p_sinks, p_slopes, p_biases, p_out, p_partial, p_log_sum, p_arrived, p_tables,
                scale, soft_cap, window, num_bias,
                stride_q_token, stride_q_head, stride_out_token, stride_out_head,
                stride_block, stride_value, stride_head, stride_slot, stride_table, stride_split,
                G, Q, BG, D, S, BM, BN, BD, BS, MAX_SPLITS, USE_WINDOW, USE_CAP, MERGE, MERGE, PRECISION,
            )  # fmt: skip
            item = next_item
    else:
        i_split, i_r = tl.program_id(1), tl.program_id(2)
        b_len = tl.load(p_seq_lens + i_r)
        lo, start, split = cut_context(b_len, window + Q - 1, BN, USE_WINDOW, MAX_SPLITS, SPLIT_KEYS)
        begin = start + i_split * split
        end = tl.minimum(begin + split, b_len)
        if begin < end:
            attend_split(
                i_r, i_split, 0, tl.cdiv(b_len - start, split), b_len, lo, begin, end,
                p_q, p_cache, p_scales, p_sinks, p_slopes, p_biases, p_out, p_partial, p_log_sum, p_arrived, p_tables,
                scale, soft_cap, window, num_bias,
                stride_q_token, stride_q_head, stride_out_token, stride_out_head,
                stride_block, stride_value, stride_head, stride_slot, stride_table, stride_split,
                G, Q, BG, D, S, BM, BN, BD, BS, MAX_SPLITS, USE_WINDOW, USE_CAP, MERGE, False, PRECISION,
            )  # fmt: skip


def decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    scratch: DecodeScratch,
    out: torch.Tensor,
    options: AttentionOptions,
    tile: DecodeTile | None = None,
    each: int = 1,
) -> None:
    """Write the first num_decodes * `each` rows of out [T, Hq, D], a request's last tokens, from query [T, Hq, D]."""
    bias = options.bias or _NO_BIAS
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    assert options.kv_scales is None or head_dim % 2 == 0, "values of a quantized cache are read in pairs"
    tile = tile or choose_tile(head_dim, query.dtype, kv_cache.dtype)
    group = num_heads // num_kv_heads
    cascade_tile = choose_cascade_tile(meta.num_decodes * group, head_dim, query.dtype)
    shared = None
    is_same = options.sliding_window is None and bias.slopes is None and bias.by_distance is None
    if is_same and scratch.shared is not None:  # whatever the position
        shared = _shared_splits(meta, scratch, tile, cascade_tile, group, block_size)
    listed = shared.singles if shared is not None else scratch.splits(meta, options.sliding_window, tile, each)
    call = DecodeCall(query, kv_cache, meta, scratch, listed, shared is not None, out, options, tile, each)
    run, _ = chosen(scratch.kernels, call)
    run(call)
    if shared is not None:
        sizes = _sizes(group, head_dim, tile, each)
        attend_runs(
            query, kv_cache, meta, shared, (scratch.partial, scratch.log_sum), options, tile_keys=tile.keys,
            tile=cascade_tile,
        )  # fmt: skip
        merge_kernel[(num_kv_heads, meta.num_decodes)](
            scratch.partial, scratch.log_sum, bias.sinks, out, meta.seq_lens,
            out.stride(0), out.stride(1), scratch.num_splits,
            num_warps=max(1, min(8, sizes["BG"] * sizes["BD"] // 128)), **sizes,
        )  # fmt: skip


def attend_splits(call: DecodeCall) -> None:
    """Launches the kernel of this file."""
    query, kv_cache, meta, scratch, listed = call.query, call.kv_cache, call.meta, call.scratch, call.listed
    options, tile, out = call.options, call.tile, call.out
    sliding_window, bias = options.sliding_window, options.bias or _NO_BIAS
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    sizes = _sizes(query.shape[1] // num_kv_heads, head_dim, tile, call.each)
    grid = (num_kv_heads, scratch.num_splits, meta.num_decodes)
    if listed is not None:
        grid = (num_kv_heads, programs_for(listed, num_kv_heads), 1)
    decode_kernel[grid](
        query, kv_cache, options.kv_scales, bias.sinks, bias.slopes, bias.by_distance, out,
        scratch.partial, scratch.log_sum, scratch.arrived, meta.block_table, meta.seq_lens,
        meta.seq_lens if listed is None else listed.items,
        meta.seq_lens if listed is None else listed.count,
        options.scale, options.soft_cap or 1.0, sliding_window or 0,
        0 if bias.by_distance is None else bias.by_distance.shape[1],
        query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        *kv_cache.stride()[:4], meta.block_table.stride(0), scratch.num_splits,
        S=block_size,
        Q=call.each,
        BM=max(16, sizes["BG"]),
        USE_WINDOW=sliding_window is not None,
        USE_CAP=options.soft_cap is not None,
        USE_LIST=listed is not None,
        MERGE=not call.is_shared,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=max(tile.num_stages, 3) if meta.num_decodes * num_kv_heads <= _FEW_PROGRAMS else tile.num_stages,
        **sizes,
        **early_launch(query.device),
        **register_limit(tile.max_registers if sizes["BG"] <= 16 else None),
    )  # fmt: skip


KERNEL = Kernel(lambda _: True, attend_splits)  # serves all


def _sizes(group: int, head_dim: int, tile: DecodeTile, each: int) -> dict[str, int]:
    """Returns how contexts are cut and partial results merged: what both kernels are compiled for."""
    rows, columns = next_power_of_2(group * each), head_columns(head_dim)
    return {
        "G": group,
        "BG": rows,
        "D": head_dim,
        "BN": tile.keys,
        "BD": columns,
        "BS": max(1, min(8, _MERGE_ELEMENTS // (rows * columns))),
        "MAX_SPLITS": triton_splits.MAX_SPLITS,
        "SPLIT_KEYS": triton_splits.SPLIT_KEYS,
    }


def _shared_splits(
    meta: AttentionMetadata,
    scratch: DecodeScratch,
    tile: DecodeTile,
    cascade_tile: CascadeTile,
    group: int,
    block_size: int,
) -> SharedSplits | None:
    """Returns how a layer without a window shares its splits; None: not at all."""
    group_slots = group_slots_of(cascade_tile, group)
    if scratch.shared is None or group_slots == 1:
        return None
    key = (tile.keys, group_slots)
    if key not in scratch.shared:
        scratch.shared[key] = share_splits(
            meta, scratch.num_splits, tile.keys, block_size, group_slots, cascade_tile.run
        )
    return scratch.shared[key]
