# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention to keys and values that are computed from the latents of whole contexts, a chunk of them at a time.

The contexts of a step's requests lie one behind the other, and a chunk is as many of these positions as the workspace
holds, whatever requests they belong to. Of each chunk the latents are gathered from the cache, taken through `up` by
one product, and met by the queries that see any of it. A query whose context goes on in a later chunk leaves the result
so far and the logarithm of its sum, from which that chunk goes on (Milakov and Gimelshein, 2018). How many chunks there
are the host knows from bounds: nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from app.kernels.attention import AttentionMetadata
from app.kernels.attention.triton_tile import LOG2_E, NO_MAX
from app.kernels.kernel_table import Kernel
from app.kernels.launch import cdiv, next_power_of_2, shared_memory
from app.kernels.quick_launch import quick_launch

_GATHER_TOKENS = 16
_GATHER_REQUESTS = 16  # whose places are compared at a time


@dataclass(slots=True, frozen=True)
class ExpandedTile:
    """Tile sizes and launch options: `rows` tokens of a head meet `keys` positions at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@dataclass(slots=True, frozen=True)
class Chunk:
    """Some of the positions of all contexts, expanded."""

    first: int  # its first position, among those of all contexts
    size: int
    latents: torch.Tensor  # [size, R + Dr], of the queries' type
    expanded: torch.Tensor  # [size, H, Dn + Dv]


@dataclass(slots=True, frozen=True)
class Carried:
    """Holds what queries whose contexts go on in the next chunk have so far."""

    result: torch.Tensor  # fp32 [T, H, Dv], divided by the sum
    log_sum: torch.Tensor  # fp32 [T, H], base 2


_WIDE = tuple(ExpandedTile(rows=128, keys=64, num_warps=8, num_stages=stages) for stages in (3, 2))
_NARROW = tuple(ExpandedTile(rows=64, keys=32, num_warps=4, num_stages=stages) for stages in (2, 1))
_BESIDE = 2 << 10  # bytes of shared memory that a kernel takes beside its queries, keys and values


def choose_tile(key_width: int, value_width: int, dtype: torch.dtype, shared_bytes: int) -> ExpandedTile:
    """The first that fits by the widths that heads are padded to (keys with what turns); in bf16 at 128 + 64 and 128
    swept on an H200."""
    if dtype == torch.float32:
        return ExpandedTile(rows=32, keys=16, num_warps=4, num_stages=1)
    for tile in (*(_WIDE if value_width > 64 else ()), *_NARROW):
        held = tile.rows * key_width + tile.num_stages * tile.keys * (key_width + value_width)
        if held * dtype.itemsize + _BESIDE <= shared_bytes:
            return tile
    return _NARROW[-1]


@quick_launch
@triton.jit(do_not_specialize=["first", "size", "requests", "stride_table"])
def gather_kernel(
    p_cache, p_scale, p_out, p_tables, p_offsets, p_lens, first, size, requests,
    stride_block, stride_slot, stride_table,
    WIDTH: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BT positions,): latents of positions [first, first + size) of all contexts; context r begins
    at offsets[r], and what lies between two of them stays as it is."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_p = first + o_t
    b_r = tl.zeros([BT], tl.int32)
    for i_r in range(0, requests, BQ):
        o_r = i_r + tl.arange(0, BQ)
        b_end = tl.load(p_offsets + 1 + o_r, mask=o_r < requests, other=1 << 30)
        b_r += tl.sum((b_end[None, :] <= o_p[:, None]).to(tl.int32), 1)
    m_t = (o_t < size) & (b_r < requests)
    b_at = o_p - tl.load(p_offsets + b_r, mask=m_t, other=0)
    m_t = m_t & (b_at < tl.load(p_lens + b_r, mask=m_t, other=0))
    b_block = tl.load(p_tables + b_r.to(tl.int64) * stride_table + b_at // S, mask=m_t, other=0).to(tl.int64)
    o_w = tl.arange(0, BW)
    m = m_t[:, None] & (o_w < WIDTH)[None, :]
    o_slot = b_block * stride_block + b_at % S * stride_slot
    b_x = tl.load(p_cache + o_slot[:, None] + o_w[None, :], mask=m, other=0.0)
    if p_scale is not None:
        b_x = b_x.to(tl.float32) * tl.load(p_scale)
    tl.store(p_out + o_t[:, None] * WIDTH + o_w[None, :], b_x.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def attend_keys(
    b_q, b_turned, b_acc, b_sum, b_max, p_rows, p_turned, i_n, hi, o_pos, factor, stride_key, stride_turned,
    DN: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, BDN: tl.constexpr, BDR: tl.constexpr,
    BDV: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys and values of positions [i_n, i_n + BN) into (b_acc, b_sum, b_max) and return them; MASKED: some
    row does not see all of them, or they do not lie below hi."""
    o_n = i_n + tl.arange(0, BN)
    o_d, o_t, o_v = tl.arange(0, BDN), tl.arange(0, BDR), tl.arange(0, BDV)
    m_n = o_n < hi
    p_k = p_rows + o_n.to(tl.int64)[:, None] * stride_key
    p_t = p_turned + o_n.to(tl.int64)[:, None] * stride_turned
    if MASKED:
        b_k = tl.load(p_k + o_d[None, :], mask=m_n[:, None] & (o_d < DN)[None, :], other=0.0)
        b_t = tl.load(p_t + o_t[None, :], mask=m_n[:, None] & (o_t < DR)[None, :], other=0.0)
        b_v = tl.load(p_k + DN + o_v[None, :], mask=m_n[:, None] & (o_v < DV)[None, :], other=0.0)
    else:
        b_k = tl.load(p_k + o_d[None, :], mask=(o_d < DN)[None, :], other=0.0)
        b_t = tl.load(p_t + o_t[None, :], mask=(o_t < DR)[None, :], other=0.0)
        b_v = tl.load(p_k + DN + o_v[None, :], mask=(o_v < DV)[None, :], other=0.0)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_s = tl.dot(b_turned, tl.trans(b_t), b_s, input_precision=PRECISION)
    if MASKED:
        b_s = tl.where((o_n[None, :] <= o_pos[:, None]) & m_n[None, :], b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * factor)
    b_scale = tl.exp2(b_max - b_new_max)
    b_p = tl.exp2(b_s * factor - b_new_max[:, None])
    b_sum = b_sum * b_scale + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None], input_precision=PRECISION)
    return b_acc, b_sum, b_new_max


@quick_launch
@triton.jit(do_not_specialize=["first", "size"])
def expanded_kernel(
    p_q, p_expanded, p_latents, p_out, p_result, p_log_sum, p_query_start_loc, p_offsets, p_lens, scale, first, size,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_key, stride_key_head, stride_turned,
    H: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BDN: tl.constexpr, BDR: tl.constexpr, BDV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of the longest query, H, requests): tokens of a head meet what they see of a chunk. `p_latents` are
    the rotated keys. Late tiles, which see most, start first."""
    i_head, i_r = tl.program_id(1), tl.program_id(2)
    b_start = tl.load(p_query_start_loc + i_r)
    b_count = tl.load(p_query_start_loc + i_r + 1) - b_start
    b_offset = tl.load(p_offsets + i_r)
    b_len = tl.load(p_lens + i_r)
    i_q = tl.cdiv(b_count, BM) - 1 - tl.program_id(0)
    begin = tl.maximum(first - b_offset, 0)  # the chunk's part of the context
    end = tl.minimum(first + size - b_offset, b_len)
    seen = b_len - b_count + tl.minimum((i_q + 1) * BM, b_count)  # positions that the tile sees
    hi = tl.minimum(seen, end)
    if (i_q >= 0) & (begin < hi):
        o_m = i_q * BM + tl.arange(0, BM)
        m_m = o_m < b_count
        o_d, o_t, o_v = tl.arange(0, BDN), tl.arange(0, BDR), tl.arange(0, BDV)
        o_row = (b_start + o_m).to(tl.int64)
        p_query = p_q + (o_row * stride_q_token + i_head * stride_q_head)[:, None]
        b_q = tl.load(p_query + o_d[None, :], mask=m_m[:, None] & (o_d < DN)[None, :], other=0.0)
        b_turned = tl.load(p_query + DN + o_t[None, :], mask=m_m[:, None] & (o_t < DR)[None, :], other=0.0)
        b_acc = tl.zeros([BM, BDV], dtype=tl.float32)
        b_sum = tl.zeros([BM], dtype=tl.float32)
        b_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
        o_pos = b_len - b_count + o_m
        factor = scale * LOG2_E
        p_rows = p_expanded + (b_offset - first).to(tl.int64) * stride_key + i_head * stride_key_head
        p_turned = p_latents + (b_offset - first).to(tl.int64) * stride_turned
        # Tiles up to here are seen by all rows.
        whole = tl.maximum(tl.minimum(b_len - b_count + i_q * BM + 1, end) - begin, 0) // BN * BN + begin
        for i_n in range(begin, whole, BN):
            b_acc, b_sum, b_max = attend_keys(
                b_q, b_turned, b_acc, b_sum, b_max, p_rows, p_turned, i_n, hi, o_pos, factor, stride_key, stride_turned,
                DN, DR, DV, BN, BDN, BDR, BDV, False, PRECISION,
            )  # fmt: skip
        for i_n in range(whole, hi, BN):
            b_acc, b_sum, b_max = attend_keys(
                b_q, b_turned, b_acc, b_sum, b_max, p_rows, p_turned, i_n, hi, o_pos, factor, stride_key, stride_turned,
                DN, DR, DV, BN, BDN, BDR, BDV, True, PRECISION,
            )  # fmt: skip
        b_total = tl.where(b_sum > 0, b_sum, 1.0)  # some rows may see nothing of the chunk
        b_out = b_acc / b_total[:, None]
        b_log = tl.where(b_sum > 0, b_max + tl.log2(b_total), NO_MAX)
        m_o = m_m[:, None] & (o_v < DV)[None, :]
        p_before = p_result + ((o_row * H + i_head) * DV)[:, None] + o_v[None, :]
        p_log = p_log_sum + o_row * H + i_head
        if begin > 0:
            b_old = tl.load(p_log, mask=m_m, other=0.0)
            b_new = tl.maximum(b_old, b_log)
            b_left, b_right = tl.exp2(b_old - b_new), tl.exp2(b_log - b_new)
            b_total = b_left + b_right
            b_before = tl.load(p_before, mask=m_o, other=0.0)
            b_out = (b_before * b_left[:, None] + b_out * b_right[:, None]) / b_total[:, None]
            b_log = b_new + tl.log2(b_total)
        if seen <= end:
            p_o = p_out + (o_row * stride_out_token + i_head * stride_out_head)[:, None] + o_v[None, :]
            tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_o)
        else:
            tl.store(p_before, b_out, mask=m_o)
            tl.store(p_log, b_log, mask=m_m)


def gather(
    cache: torch.Tensor, meta: AttentionMetadata, offsets: torch.Tensor, kv_scale: torch.Tensor | None, chunk: Chunk
) -> None:
    """Fill chunk.latents from cache [B, S, R + Dr]; `offsets` int32 [R + 1]: where contexts begin among all, and
    the end."""
    width = cache.shape[2]
    gather_kernel[(cdiv(chunk.size, _GATHER_TOKENS),)](
        cache, kv_scale, chunk.latents, meta.block_table, offsets, meta.seq_lens, chunk.first, chunk.size,
        meta.seq_lens.shape[0], cache.stride(0), cache.stride(1), meta.block_table.stride(0),
        WIDTH=width, S=cache.shape[1], BT=_GATHER_TOKENS, BW=next_power_of_2(width),
        BQ=_GATHER_REQUESTS, num_warps=4,
    )  # fmt: skip


def attend_chunk(
    query: torch.Tensor,
    meta: AttentionMetadata,
    offsets: torch.Tensor,
    chunk: Chunk,
    carried: Carried,
    out: torch.Tensor,
    scale: float,
    tile: ExpandedTile | None = None,
) -> None:
    """query [T, H, Dn + Dr] to a chunk's keys and values, on from `carried` into it or into out [T, H, Dv]."""
    num_heads, value_dim = out.shape[1:]
    nope = chunk.expanded.shape[2] - value_dim
    turned = query.shape[2] - nope
    latent = chunk.latents.shape[1] - turned
    padded = [max(16, next_power_of_2(width)) for width in (nope, turned, value_dim)]
    tile = tile or choose_tile(sum(padded[:2]), padded[2], query.dtype, shared_memory(query.device))
    expanded_kernel[(cdiv(meta.max_query_len, tile.rows), num_heads, meta.seq_lens.shape[0])](
        query, chunk.expanded, chunk.latents[:, latent:], out, carried.result, carried.log_sum, meta.query_start_loc,
        offsets, meta.seq_lens, scale, chunk.first, chunk.size,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), chunk.expanded.stride(0),
        chunk.expanded.stride(1), chunk.latents.stride(0),
        H=num_heads, DN=nope, DR=turned, DV=value_dim, BM=tile.rows, BN=tile.keys,
        BDN=padded[0], BDR=padded[1], BDV=padded[2],
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def serves(query: torch.Tensor, up: torch.Tensor, value_dim: int) -> bool:
    """True of all steps."""
    return True


KERNEL = Kernel(serves, attend_chunk)
