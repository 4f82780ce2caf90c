# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Chunked-prefill paged attention: requests with any number of query tokens over cached and new positions alike.

A program attends a tile of one request's tokens, packed with the query heads of one KV head, over all positions that
the tile sees. Tiles of keys that every token sees skip the mask. Late tiles, which see most, start first. The tiling
and the online softmax are those of FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.attention import AttentionMetadata, AttentionOptions, HeadBias
from app.kernels.attention.triton_quantize import query_to_fp8_keys
from app.kernels.attention.triton_tile import NO_MAX, attend_tile, head_columns, weight_of_sink
from app.kernels.kernel_table import Kernel
from app.kernels.launch import cdiv, next_power_of_2, shared_memory
from app.kernels.quick_launch import quick_launch

_LARGE_TILE_BYTES = 99 << 10  # of shared memory, that the largest tiles need: as GPUs of NVIDIA's have since Ampere


@dataclass(slots=True, frozen=True)
class PrefillTile:
    """Tile sizes and launch options: `rows` (token, head) pairs meet `keys` positions at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tile(head_dim: int, dtype: torch.dtype, shared_bytes: int = 227 << 10) -> PrefillTile:
    """A table by head size and dtype; bf16 at 128 was swept on an H200 with Triton 3.6, where a tile of 64 keys in four
    warps spills registers. Full fp32 has no tensor cores."""
    padded = next_power_of_2(head_dim)
    if dtype == torch.float32:
        return PrefillTile(
            rows=32 if padded <= 128 else 16, keys=32 if padded <= 256 else 16, num_warps=4, num_stages=1
        )
    if padded >= 128 and shared_bytes < _LARGE_TILE_BYTES:  # AMD's have 64 KiB; not swept there
        return PrefillTile(rows=64, keys=32, num_warps=4, num_stages=1)
    if padded == 128:
        return PrefillTile(rows=128, keys=128, num_warps=8, num_stages=2)
    if padded < 128:
        return PrefillTile(rows=128, keys=64, num_warps=4, num_stages=3)
    if padded > 256:  # Gemma 4's; not swept
        return PrefillTile(rows=64, keys=32, num_warps=8, num_stages=1)
    if padded == 256 and dtype.itemsize == 2 and shared_bytes >= 192 << 10:
        return PrefillTile(rows=128, keys=64, num_warps=8, num_stages=2)
    return PrefillTile(rows=64, keys=32, num_warps=4, num_stages=2)


@quick_launch
@triton.jit(do_not_specialize=["window", "first_request", "stride_table"])
def prefill_kernel(
    p_q,
    p_cache,
    p_scales,
    p_sinks,
    p_slopes,
    p_biases,
    p_out,
    p_tables,
    p_query_start_loc,
    p_seq_lens,
    scale,
    soft_cap,
    window,
    num_bias,
    first_request,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_block,
    stride_value,
    stride_head,
    stride_slot,
    stride_table,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    USE_WINDOW: tl.constexpr,
    USE_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (tiles of the longest query, Hkv, requests from first_request on)."""
    BQ: tl.constexpr = BM // G  # tokens of a tile
    i_head = tl.program_id(1)
    i_r = first_request + tl.program_id(2)
    b_start = tl.load(p_query_start_loc + i_r)
    b_num_query = tl.load(p_query_start_loc + i_r + 1) - b_start
    i_q = tl.cdiv(b_num_query, BQ) - 1 - tl.program_id(0)
    if i_q < 0:
        return
    b_len = tl.load(p_seq_lens + i_r)
    o_m = tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    o_token = i_q * BQ + o_m // G
    m_m = (o_m < BQ * G) & (o_token < b_num_query)
    m_q = m_m[:, None] & (o_d[None, :] < D)
    o_row = (b_start + o_token).to(tl.int64)
    o_head = i_head * G + o_m % G
    b_q = tl.load(p_q + (o_row * stride_q_token + o_head * stride_q_head)[:, None] + o_d[None, :], mask=m_q, other=0.0)
    b_acc = tl.zeros([BM, BD], dtype=tl.float32)
    b_sum = tl.zeros([BM], dtype=tl.float32)
    b_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
    p_head = p_cache + i_head * stride_head
    p_table = p_tables + i_r.to(tl.int64) * stride_table
    first_pos = b_len - b_num_query + i_q * BQ
    o_pos = b_len - b_num_query + o_token
    if p_scales is not None:
        scale = scale * tl.load(p_scales + i_head)
        b_q = query_to_fp8_keys(b_q)
    b_slope = None
    if p_slopes is not None:
        b_slope = tl.load(p_slopes + o_head)
    p_bias = None
    if p_biases is not None:
        p_bias = p_biases + o_head * num_bias
    hi = tl.minimum(first_pos + BQ, b_len)
    lo = 0
    i_seen = 0
    i_masked = (first_pos + 1) // BN * BN  # from i_seen to here, keys are seen by all of the tile
    if USE_WINDOW:
        lo = tl.maximum(first_pos - window + 1, 0)
        i_seen = tl.minimum(tl.cdiv(tl.maximum(first_pos + BQ - window, 0), BN) * BN, i_masked)
        for i_n in range(lo // BN * BN, i_seen, BN):
            b_acc, b_sum, b_max = attend_tile(
                b_q, b_acc, b_sum, b_max, p_head, p_table, i_n, lo, hi, o_pos, scale, soft_cap, window, b_slope,
                p_bias, num_bias, stride_block, stride_value, stride_slot, D, S, BN, BD, True, True, USE_CAP, PRECISION,
            )  # fmt: skip
    for i_n in range(i_seen, i_masked, BN):
        b_acc, b_sum, b_max = attend_tile(
            b_q, b_acc, b_sum, b_max, p_head, p_table, i_n, lo, hi, o_pos, scale, soft_cap, window, b_slope,
            p_bias, num_bias, stride_block, stride_value, stride_slot, D, S, BN, BD, False, False, USE_CAP, PRECISION,
        )  # fmt: skip
    for i_n in range(i_masked, hi, BN):
        b_acc, b_sum, b_max = attend_tile(
            b_q, b_acc, b_sum, b_max, p_head, p_table, i_n, lo, hi, o_pos, scale, soft_cap, window, b_slope,
            p_bias, num_bias,
            stride_block, stride_value, stride_slot, D, S, BN, BD, True, USE_WINDOW, USE_CAP, PRECISION,
        )  # fmt: skip
    if p_sinks is not None:
        b_sum += weight_of_sink(tl.load(p_sinks + o_head), b_max)
    b_out = b_acc / b_sum[:, None]
    if p_scales is not None:
        b_out = b_out * tl.load(p_scales + tl.num_programs(1) + i_head)
    p_o = p_out + (o_row * stride_out_token + o_head * stride_out_head)[:, None] + o_d[None, :]
    tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_q)


def prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    meta: AttentionMetadata,
    out: torch.Tensor,
    options: AttentionOptions,
    tile: PrefillTile | None = None,
) -> None:
    """Write the rows of out [T, Hq, D] of the requests from num_decodes on."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    tile = tile or choose_tile(head_dim, query.dtype, shared_memory(query.device))
    num_rows = max(tile.rows, next_power_of_2(group))
    num_requests = meta.seq_lens.shape[0] - meta.num_decodes
    bias = options.bias or HeadBias()
    prefill_kernel[(cdiv(meta.max_query_len, num_rows // group), num_kv_heads, num_requests)](
        query,
        kv_cache,
        options.kv_scales,
        bias.sinks,
        bias.slopes,
        bias.by_distance,
        out,
        meta.block_table,
        meta.query_start_loc,
        meta.seq_lens,
        options.scale,
        options.soft_cap or 1.0,
        options.sliding_window or 0,
        0 if bias.by_distance is None else bias.by_distance.shape[1],
        meta.num_decodes,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        *kv_cache.stride()[:4],
        meta.block_table.stride(0),
        G=group,
        D=head_dim,
        S=block_size,
        BM=num_rows,
        BN=tile.keys,
        BD=head_columns(head_dim),
        USE_WINDOW=options.sliding_window is not None,
        USE_CAP=options.soft_cap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def serves(query: torch.Tensor, kv_cache: torch.Tensor, options: AttentionOptions) -> bool:
    """True of all steps."""
    return True


KERNEL = Kernel(serves, prefill)
