# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Prefill for Hopper GPUs, written in Gluon: one warp copies keys and values, two groups of four warps compute.

The same result as triton_prefill.py, by the pipeline of gluon_pipeline.py, of (token, head) rows. Keys and values come
one piece of a block at a time, so blocks of any size serve. Triton's interpreter cannot run Gluon; the tests of this
file need the GPU.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.attention import AttentionMetadata, AttentionOptions
from app.kernels.attention.gluon_pipeline import KEYS, LOG2_E, PANEL, PANEL_LAYOUT, ROWS, STAGES, attend_tiles, ring
from app.kernels.kernel_table import Kernel
from app.kernels.launch import cdiv
from app.kernels.quick_launch import quick_launch

# Least window of heads of 64. Triton's kernel took 193 us and this one 244 with a window of 128,
# 511 and 468 with one of 1,024, 1,637 and 1,320 without (64 heads, 8,192 tokens, an H200).
LEAST_WINDOW = 512
# Tokens up to which all heads' late tiles start before the others, so that the last programs are short ones: an H200
# took 27 us in the place of 33 for 1,024 tokens of 32 heads; of 8,192, whose heads then share the caches, 979 for 899.
MOST_SPREAD = 2048
BASE_2 = gl.constexpr(LOG2_E)


@gluon.jit
def copy_partition(
    desc, k_smem, v_smem, k_ready, v_ready, k_free, v_free, p_table, i_head, num_tiles, first_tile, last_block,
    HKV: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """One warp: the tiles of keys and values from first_tile on, the last first. Blocks past the request are the last
    one again."""
    BOX: gl.constexpr = desc.block_shape[0]  # slots that one copy takes: a block, or a tile if that is less
    COLUMNS: gl.constexpr = k_smem.shape[2] // PANEL
    PIECES: gl.constexpr = KEYS // BOX
    # Shared memory holds a tile panel by panel, so a piece of a panel is contiguous.
    k_pieces = k_smem._reinterpret(desc.dtype, [STAGES * COLUMNS * PIECES, BOX, PANEL], desc.layout)
    v_pieces = v_smem._reinterpret(desc.dtype, [STAGES * COLUMNS * PIECES, BOX, PANEL], desc.layout)
    for j in range(num_tiles - first_tile):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        rows = gl.tuple(())
        for i in gl.static_range(PIECES):
            i_n = (num_tiles - 1 - j) * KEYS + i * BOX
            block = gl.load(p_table + gl.minimum(i_n // S, last_block))
            rows = rows + gl.tuple(((block * (2 * HKV) + i_head) * S + i_n % S,))
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), KEYS * COLUMNS * PANEL * 2)
        for i in gl.static_range(PIECES):
            for c in gl.static_range(COLUMNS):
                piece = k_pieces.index((stage * COLUMNS + c) * PIECES + i)
                tma.async_copy_global_to_shared(desc, [rows[i], c * PANEL], k_ready.index(stage), piece)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), KEYS * COLUMNS * PANEL * 2)
        for i in gl.static_range(PIECES):
            for c in gl.static_range(COLUMNS):
                piece = v_pieces.index((stage * COLUMNS + c) * PIECES + i)
                tma.async_copy_global_to_shared(desc, [rows[i] + HKV * S, c * PANEL], v_ready.index(stage), piece)


@gluon.jit
def start_scores(queries, keys, stage, S_LAYOUT: gl.constexpr):
    """Scores [ROWS, KEYS] of the keys in a stage, under way."""
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    return warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def attend_partition(
    GROUP: gl.constexpr, q_all, k_smem, v_smem, k_ready, v_ready, k_free, v_free, p_q, p_out, p_sinks, window, factor,
    i_head, i_q, b_start, b_num_query, b_len, num_tiles, first_tile, num_masked, num_full,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, G: gl.constexpr, BQ: gl.constexpr,
):  # fmt: skip
    """Four warps: rows [GROUP * ROWS, (GROUP + 1) * ROWS) of the program's tile."""
    D: gl.constexpr = k_smem.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    q_smem = q_all.index(GROUP)
    # The queries: global memory to registers to shared memory.
    o_m = GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    o_token = i_q * BQ + o_m // G
    o_row = (b_start + o_token).to(gl.int64)
    o_head = i_head * G + o_m % G
    m_q = ((o_m < BQ * G) & (o_token < b_num_query))[:, None] & (o_d[None, :] < D)
    p_tile = p_q + (o_row * stride_q_token + o_head * stride_q_head)[:, None] + o_d[None, :]
    q_smem.store(gl.load(p_tile, mask=m_q, other=0.0))
    fence_async_shared()
    # The last position that each row sees. Rows that only pad the tile see some too; they are not stored.
    o_pos = b_len - b_num_query + i_q * BQ + (GROUP * ROWS + gl.arange(0, ROWS, layout=ROW_LAYOUT)) // G
    o_pos = gl.minimum(o_pos, b_len - 1)
    lo = 0  # the first key that any row sees
    if window is not None:
        lo = b_len - b_num_query + i_q * BQ - window + 1
    b_acc, b_max, b_sum = attend_tiles(
        start_scores, q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, (num_tiles - 1) * KEYS,
        num_tiles - first_tile, num_masked, num_full, o_pos, lo, b_len, window, factor, WIDE,
    )  # fmt: skip
    if p_sinks is not None:  # a score that has no value
        o_sink = i_head * G + (GROUP * ROWS + gl.arange(0, ROWS, layout=ROW_LAYOUT)) % G
        b_sum += gl.exp2(gl.load(p_sinks + o_sink).to(gl.float32) * BASE_2 - b_max)
    b_acc = b_acc / gl.convert_layout(b_sum, gl.SliceLayout(1, b_acc.type.layout))[:, None]
    # Through the queries' place to whole rows: 16 bytes a thread.
    q_smem.store(b_acc.to(q_smem.dtype))
    p_tile = p_out + (o_row * stride_out_token + o_head * stride_out_head)[:, None] + o_d[None, :]
    gl.store(p_tile, q_smem.load(WIDE), mask=m_q)


@quick_launch
@gluon.jit(do_not_specialize=["first_request", "heads_first", "stride_table"])
def prefill_gluon_kernel(
    desc, p_q, p_out, p_sinks, p_tables, p_query_start_loc, p_seq_lens, window, factor, first_request, heads_first,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_table,
    G: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of the longest query, Hkv, requests from first_request on), or with heads_first Hkv before tiles.
    `desc` sees the cache as rows [B * 2 * HKV * S, D]; p_sinks [Hq] and window or None; factor turns scores to base 2.
    Late tiles, which see most, start first: those of a head, or of all."""
    BQ: gl.constexpr = 2 * ROWS // G  # tokens of a tile
    i_head = gl.program_id(0) if heads_first else gl.program_id(1)
    i_tile = gl.program_id(1) if heads_first else gl.program_id(0)
    i_r = first_request + gl.program_id(2)
    b_start = gl.load(p_query_start_loc + i_r)
    b_num_query = gl.load(p_query_start_loc + i_r + 1) - b_start
    b_len = gl.load(p_seq_lens + i_r)
    i_q = gl.cdiv(b_num_query, BQ) - 1 - i_tile
    if i_q >= 0:
        p_table = p_tables + i_r.to(gl.int64) * stride_table
        first_pos = b_len - b_num_query + i_q * BQ
        num_tiles = gl.cdiv(gl.minimum(first_pos + BQ, b_len), KEYS)
        num_masked = num_tiles - (first_pos + 1) // KEYS  # the others are seen by all rows,
        first_tile, num_full = 0, num_tiles
        if window is not None:  # but for those at the window's edge
            first_tile = gl.maximum(first_pos - window + 1, 0) // KEYS
            num_full = num_tiles - gl.cdiv(gl.maximum(first_pos + BQ - window, 0), KEYS)
        q_smem = gl.allocate_shared_memory(desc.dtype, [2, ROWS, D], desc.layout)
        k_smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, D], desc.layout)
        v_smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, D], desc.layout)
        k_ready, k_free = ring()
        v_ready, v_free = ring()
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_partition, (
                    0, q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, p_q, p_out, p_sinks, window, factor,
                    i_head, i_q, b_start, b_num_query, b_len, num_tiles, first_tile, num_masked, num_full,
                    stride_q_token, stride_q_head, stride_out_token, stride_out_head, G, BQ,
                )),
                (attend_partition, (
                    1, q_smem, k_smem, v_smem, k_ready, v_ready, k_free, v_free, p_q, p_out, p_sinks, window, factor,
                    i_head, i_q, b_start, b_num_query, b_len, num_tiles, first_tile, num_masked, num_full,
                    stride_q_token, stride_q_head, stride_out_token, stride_out_head, G, BQ,
                )),
                (copy_partition, (
                    desc, k_smem, v_smem, k_ready, v_ready, k_free, v_free, p_table, i_head, num_tiles,
                    first_tile, (b_len - 1) // S, HKV, S,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def serves(query: torch.Tensor, kv_cache: torch.Tensor, options: AttentionOptions) -> bool:
    """True if the shapes suit: 16 bits, blocks of a power of two; sinks, but no other bias."""
    block_size, head_dim, window = kv_cache.shape[3], query.shape[2], options.sliding_window
    if window is not None and head_dim < 128 and window < LEAST_WINDOW:
        return False
    return (
        options.soft_cap is None
        and (options.bias is None or (options.bias.slopes is None and options.bias.by_distance is None))
        and query.dtype in (torch.bfloat16, torch.float16)
        and kv_cache.dtype == query.dtype
        and kv_cache.is_contiguous()
        and head_dim in (64, 128)
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and query.shape[1] // kv_cache.shape[2] <= 64
    )


def prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    options: AttentionOptions,
) -> None:
    """The same as `triton_prefill.prefill`, where `serves` agrees."""
    sinks = None if options.bias is None else options.bias.sinks
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    num_requests = meta.seq_lens.shape[0] - meta.num_decodes
    rows = kv_cache.view(-1, head_dim)
    box = [min(block_size, KEYS.value), PANEL.value]
    descriptor = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), box, PANEL_LAYOUT)
    num_tiles = cdiv(meta.max_query_len, 2 * ROWS.value // group)
    heads_first = meta.max_query_len <= MOST_SPREAD and (meta.is_static or meta.max_seq_len <= MOST_SPREAD)
    places = (num_kv_heads, num_tiles) if heads_first else (num_tiles, num_kv_heads)
    prefill_gluon_kernel[(*places, num_requests)](
        descriptor, query, out, sinks, meta.block_table, meta.query_start_loc, meta.seq_lens,
        options.sliding_window, options.scale * LOG2_E, meta.num_decodes, heads_first,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), meta.block_table.stride(0),
        G=group, HKV=num_kv_heads, D=head_dim, S=block_size, num_warps=4, maxnreg=168,
    )  # fmt: skip


KERNEL = Kernel(serves, prefill)
