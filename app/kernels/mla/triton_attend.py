# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
"""Attention of absorbed queries to cached latents (FlashMLA's way, DeepSeek, 2025): one key for all heads, whose first
numbers are the value too, so that a tile of the cache is read once.

Rows are (token, head) pairs of a request, causal by token; a program works through its share of the step
(triton_schedule.py). The online softmax is that of triton_tile.py. Products of the latent and of the rotated key are
two, so that neither is padded to the other's width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.attention import AttentionMetadata
from app.kernels.attention.triton_quantize import query_to_fp8_keys
from app.kernels.attention.triton_tile import LOG2_E, NO_MAX, tile_offsets
from app.kernels.kernel_table import Kernel
from app.kernels.launch import cdiv, early_launch, next_power_of_2, shared_memory
from app.kernels.mla.triton_schedule import AttendTile, Shares, load_job
from app.kernels.quick_launch import quick_launch

_LARGE_TILE_BYTES = 222 << 10  # of shared memory, that the largest tiles need


def choose_tile(num_rows: int, dtype: torch.dtype, latent_size: int, shared_bytes: int) -> AttendTile:
    """`num_rows`: (token, head) pairs of the longest query. Swept on an H200 with latents of 512 in bf16."""
    if dtype == torch.float32:
        return AttendTile(rows=16, keys=16, num_warps=4, num_stages=1, programs=1)
    if shared_bytes < _LARGE_TILE_BYTES:  # AMD's have 64 KiB; not swept there
        return AttendTile(rows=16, keys=16, num_warps=4, num_stages=1, programs=2)
    if num_rows <= 16 or latent_size > 512:
        return AttendTile(rows=16, keys=32, num_warps=4, num_stages=5, programs=2)
    return AttendTile(rows=64, keys=64, num_warps=8, num_stages=2, programs=1)


@triton.jit
def attend_latents(
    b_q, b_turned, b_acc, b_sum, b_max, p_cache, p_table, i_n, hi, o_pos, factor, stride_block, stride_slot,
    R: tl.constexpr, DR: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BDR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the latents of positions [i_n, i_n + BN) below hi into (b_acc, b_sum, b_max) and return them."""
    o_n = i_n + tl.arange(0, BN)
    o_d = tl.arange(0, BR)
    o_t = tl.arange(0, BDR)
    m_n = o_n < hi
    p_n = p_cache + tile_offsets(p_table, i_n, o_n, m_n, stride_block, stride_slot, S, BN)[:, None]
    b_c = tl.load(p_n + o_d[None, :], mask=m_n[:, None] & (o_d[None, :] < R), other=0.0).to(b_q.dtype)
    b_t = tl.load(p_n + R + o_t[None, :], mask=m_n[:, None] & (o_t[None, :] < DR), other=0.0).to(b_q.dtype)
    b_s = tl.dot(b_q, tl.trans(b_c), input_precision=PRECISION)
    b_s = tl.dot(b_turned, tl.trans(b_t), b_s, input_precision=PRECISION)
    b_s = tl.where((o_n[None, :] <= o_pos[:, None]) & m_n[None, :], b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * factor)
    b_scale = tl.exp2(b_max - b_new_max)
    b_p = tl.exp2(b_s * factor - b_new_max[:, None])
    b_sum = b_sum * b_scale + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_c.dtype), b_c, b_acc * b_scale[:, None], input_precision=PRECISION)
    return b_acc, b_sum, b_new_max


@triton.jit
def attend_job(
    job, at, stop, p_q, p_cache, p_scale, p_out, p_partial, p_log_sum, p_tables, p_jobs, scale,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_block, stride_slot, stride_table,
    H: tl.constexpr, R: tl.constexpr, DR: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, BDR: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what lies of a job within the tiles [at, stop) of all: into p_out if that is all, else as a partial
    result. Returns the tile at which the next job begins."""
    i_r, first_row, b_start, b_count, b_len, before, num_tiles, after = load_job(p_jobs, job)
    begin, end = 0, num_tiles
    if not WHOLE:
        begin = tl.maximum(at - before, 0)
        end = tl.minimum(stop - before, num_tiles)
    if begin < end:
        o_m = tl.arange(0, BM)
        o_d = tl.arange(0, BR)
        o_t = tl.arange(0, BDR)
        o_row = first_row + o_m
        m_m = o_row < b_count * H
        o_token = o_row // H
        o_head = o_row % H
        o_query = (b_start + o_token).to(tl.int64) * stride_q_token + o_head * stride_q_head
        b_q = tl.load(p_q + o_query[:, None] + o_d[None, :], mask=m_m[:, None] & (o_d[None, :] < R), other=0.0)
        p_turned = p_q + R + o_query[:, None] + o_t[None, :]
        b_turned = tl.load(p_turned, mask=m_m[:, None] & (o_t[None, :] < DR), other=0.0)
        factor = scale * LOG2_E
        if p_scale is not None:
            kv_scale = tl.load(p_scale)
            factor = factor * kv_scale
            b_q, b_turned = query_to_fp8_keys(b_q), query_to_fp8_keys(b_turned)
        # Rows that only pad the tile see what the last one sees; they are not stored.
        o_pos = b_len - b_count + tl.minimum(o_token, b_count - 1)
        hi = tl.minimum(b_len, b_len - b_count + (first_row + BM - 1) // H + 1)
        b_acc = tl.zeros([BM, BR], dtype=tl.float32)
        b_sum = tl.zeros([BM], dtype=tl.float32)
        b_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
        p_table = p_tables + i_r.to(tl.int64) * stride_table
        for i_n in range(begin * BN, end * BN, BN):
            b_acc, b_sum, b_max = attend_latents(
                b_q, b_turned, b_acc, b_sum, b_max, p_cache, p_table, i_n, hi, o_pos, factor, stride_block, stride_slot,
                R, DR, S, BN, BR, BDR, PRECISION,
            )  # fmt: skip
        b_total = tl.where(b_sum > 0, b_sum, 1.0)  # some rows may see nothing of a part
        b_out = b_acc / b_total[:, None]
        if p_scale is not None:
            b_out = b_out * kv_scale
        m_o = m_m[:, None] & (o_d[None, :] < R)
        if end - begin == num_tiles:
            o_out = (b_start + o_token).to(tl.int64) * stride_out_token + o_head * stride_out_head
            tl.store(p_out + o_out[:, None] + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_o)
        else:
            place = 2 * tl.program_id(0).to(tl.int64) + tl.where(begin == 0, 1, 0)
            tl.store(p_partial + (place * BM + o_m)[:, None] * R + o_d[None, :], b_out, mask=m_o)
            b_log = tl.where(b_sum > 0, b_max + tl.log2(b_total), NO_MAX)
            tl.store(p_log_sum + place * BM + o_m, b_log, mask=m_m)
    return after


@quick_launch
@triton.jit(do_not_specialize=["stride_table"])
def attend_kernel(
    p_q, p_cache, p_scale, p_out, p_partial, p_log_sum, p_tables, p_jobs, p_first, p_totals, scale,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_block, stride_slot, stride_table,
    H: tl.constexpr, R: tl.constexpr, DR: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, BDR: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (programs,): a share each; WHOLE: a job each."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_p = tl.program_id(0)
    if WHOLE:
        if i_p < tl.load(p_totals + 2):
            attend_job(
                i_p, 0, 0, p_q, p_cache, p_scale, p_out, p_partial, p_log_sum, p_tables, p_jobs, scale,
                stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_block, stride_slot,
                stride_table, H, R, DR, S, BM, BN, BR, BDR, WHOLE, PRECISION,
            )  # fmt: skip
    else:
        share = tl.load(p_totals)
        at = i_p * share
        stop = tl.minimum(at + share, tl.load(p_totals + 1))
        job = tl.load(p_first + i_p, mask=at < stop, other=0)
        while at < stop:
            at = attend_job(
                job, at, stop, p_q, p_cache, p_scale, p_out, p_partial, p_log_sum, p_tables, p_jobs, scale,
                stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_block, stride_slot,
                stride_table, H, R, DR, S, BM, BN, BR, BDR, WHOLE, PRECISION,
            )  # fmt: skip
            job += 1


@quick_launch
@triton.jit
def merge_kernel(
    p_partial, p_log_sum, p_out, p_jobs, p_first, p_totals, stride_out_token, stride_out_head,
    H: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
    BP: tl.constexpr, BY_JOB: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (most jobs, or programs, tiles of BG rows, tiles of BC columns): rows of a job that is cut, their parts
    joined in their order. Programs: the job is the one in which the share of this and of the next program meet."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_p = tl.program_id(0)
    share = tl.load(p_totals)
    if BY_JOB:
        is_one = i_p < tl.load(p_totals + 2)
        job = i_p
    else:
        is_one = (i_p + 1) * share < tl.load(p_totals + 1)
        job = tl.load(p_first + i_p + 1, mask=is_one, other=0)
    if is_one:
        _, first_row, b_start, b_count, _, before, num_tiles, _ = load_job(p_jobs, job)
        first = before // share
        last = (before + num_tiles - 1) // share
        if BY_JOB:
            i_p = first
        o_m = tl.program_id(1) * BG + tl.arange(0, BG)
        o_row = first_row + o_m
        m_m = (o_row < b_count * H) & (o_m < BM)
        if (first < last) & (first == i_p) & (first_row + tl.program_id(1) * BG < b_count * H):
            o_c = tl.program_id(2) * BC + tl.arange(0, BC)
            o_all = first + tl.arange(0, BP)
            o_place = (2 * o_all + tl.where(o_all == first, 1, 0)) * BM
            m_all = m_m[:, None] & (o_all <= last)[None, :]
            b_logs = tl.load(p_log_sum + o_place[None, :] + o_m[:, None], mask=m_all, other=NO_MAX)
            b_max = tl.max(b_logs, 1)
            b_sum = tl.sum(tl.where(b_logs > NO_MAX, tl.exp2(b_logs - b_max[:, None]), 0.0), 1)
            b_acc = tl.zeros([BG, BC], dtype=tl.float32)
            m_o = m_m[:, None] & (o_c < R)[None, :]
            for i_s in range(first, last + 1, BS):
                o_s = i_s + tl.arange(0, BS)
                o_part = ((2 * o_s + tl.where(o_s == first, 1, 0)) * BM)[:, None] + o_m[None, :]
                m_s = (o_s <= last)[:, None] & m_m[None, :]
                b_log = tl.load(p_log_sum + o_part, mask=m_s, other=NO_MAX)
                p_part = p_partial + o_part[:, :, None] * R + o_c[None, None, :]
                b_part = tl.load(p_part, mask=m_s[:, :, None] & (o_c < R)[None, None, :], other=0.0)
                b_weight = tl.where(b_log > NO_MAX, tl.exp2(b_log - b_max[None, :]), 0.0)
                b_acc += tl.sum(b_part * b_weight[:, :, None], 0)
            o_out = (b_start + o_row // H).to(tl.int64) * stride_out_token + o_row % H * stride_out_head
            b_out = b_acc / tl.where(m_m, b_sum, 1.0)[:, None]
            tl.store(p_out + o_out[:, None] + o_c[None, :], b_out.to(p_out.dtype.element_ty), mask=m_o)


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    shares: Shares,
    out: torch.Tensor,
    *,
    scale: float,
    kv_scale: torch.Tensor | None,
) -> None:
    """query [T, H, R + Dr] over cache [B, S, R + Dr] into out [T, H, R], but for the rows of jobs that are cut."""
    num_heads, latent_size = out.shape[1:]
    turned, tile, partials = query.shape[2] - latent_size, shares.tile, shares.partials
    attend_kernel[(shares.programs,)](
        query, cache, kv_scale, out, partials.result, partials.log_sum, meta.block_table, shares.jobs, shares.first,
        shares.totals, scale,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), cache.stride(0), cache.stride(1),
        meta.block_table.stride(0),
        H=num_heads, R=latent_size, DR=turned, S=cache.shape[1], BM=tile.rows, BN=tile.keys,
        BR=max(16, next_power_of_2(latent_size)), BDR=max(16, next_power_of_2(turned)),
        WHOLE=shares.is_whole, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages, **early_launch(query.device),
    )  # fmt: skip


def serves(dtype: torch.dtype, cache: torch.Tensor, latent_size: int, num_rows: int) -> AttendTile:
    """The tile for any step; `num_rows`: (token, head) pairs of the longest query."""
    return choose_tile(num_rows, dtype, latent_size, shared_memory(cache.device))


KERNEL = Kernel(serves, attend)


def merge_tile(num_jobs: int, programs: int) -> tuple[int, int, int, bool]:
    """(rows, columns and parts that a program of `merge_kernel` takes, whether its programs go by jobs)."""
    # Few jobs have many parts each: then more programs share them.
    return (*((1, 512, 8) if 2 * num_jobs <= programs else (4, 512, 4)), num_jobs < programs - 1)


def merge(shares: Shares, out: torch.Tensor) -> None:
    """Fill the rows of out [T, H, R] whose jobs are cut."""
    if shares.is_whole:
        return
    num_heads, latent_size = out.shape[1:]
    num_jobs, num_rows = shares.jobs.shape[0], min(shares.tile.rows, shares.most_rows)
    rows, columns, parts, by_job = merge_tile(num_jobs, shares.programs)
    columns = min(columns, next_power_of_2(latent_size))
    merge_kernel[(num_jobs if by_job else shares.programs - 1, cdiv(num_rows, rows), cdiv(latent_size, columns))](
        shares.partials.result, shares.partials.log_sum, out, shares.jobs, shares.first, shares.totals,
        out.stride(0), out.stride(1),
        H=num_heads, R=latent_size, BM=shares.tile.rows, BG=rows, BC=columns, BS=parts,
        BP=next_power_of_2(shares.programs), BY_JOB=by_job, num_warps=4, **early_launch(out.device),
    )  # fmt: skip
