# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The loop over a share's jobs, of the Gluon kernels that attend latents: they differ in how a tile of rows meets one
of keys.

One warp copies the share's tiles of latents, by the GPU's copy engine (TMA), into a ring of stages; eight warps load
the queries of a job, meet its tiles, and store the result. A job's tiles go from the last to the first: what lies
behind its end is met while nothing is summed yet. Triton's interpreter cannot run Gluon.

A kernel's `attend_tiles(tiles, q_smem, u_smem, ready, free, k, begin, end, first_row, b_count, b_len, factor, H)`
returns its sums, each row's maximum and total, and the tiles that the share has met so far. Rows are the first
dimension of its sums (ROWS_AT 0), or the second (1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.attention import AttentionMetadata
from app.kernels.attention.gluon_pipeline import LOG2_E, NO_MAX, PANEL
from app.kernels.launch import early_launch
from app.kernels.mla.triton_schedule import FIELDS, AttendTile, Shares

KEYS = gl.constexpr(64)
LATENT = gl.constexpr(512)  # R
TURNED = gl.constexpr(64)  # Dr
# Its name changed from Triton 3.6 to 3.7.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def ring(STAGES: gl.constexpr):
    """Barriers of a ring of stages: what has come into each, and what may be overwritten."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    return ready, free


@gluon.jit
def load_job(p_jobs, job):
    """See `triton_schedule.load_job`."""
    p = p_jobs + job * FIELDS
    return (
        gl.load(p), gl.load(p + 1), gl.load(p + 2), gl.load(p + 3), gl.load(p + 4), gl.load(p + 5), gl.load(p + 6),
        gl.load(p + 7),
    )  # fmt: skip


@gluon.jit
def copy_partition(
    desc, c_smem, t_smem, ready, free, p_tables, p_jobs, p_first, p_totals, stride_table,
    S: gl.constexpr,
):  # fmt: skip
    """One warp: all tiles of the program's share. Blocks past the request are the last one again."""
    STAGES: gl.constexpr = ready.shape[0]
    BOX: gl.constexpr = desc.block_shape[0]  # slots that one copy takes: a block, or a tile if that is less
    COLUMNS: gl.constexpr = LATENT // PANEL
    PIECES: gl.constexpr = KEYS // BOX
    BYTES: gl.constexpr = KEYS * (LATENT + TURNED) * desc.dtype.primitive_bitwidth // 8
    # Shared memory holds a tile panel by panel, so a piece of a panel is contiguous.
    c_pieces = c_smem._reinterpret(desc.dtype, [STAGES * COLUMNS * PIECES, BOX, PANEL], desc.layout)
    t_pieces = t_smem._reinterpret(desc.dtype, [STAGES * PIECES, BOX, PANEL], desc.layout)
    i_p = gl.program_id(0)
    share = gl.load(p_totals)
    at = i_p * share
    stop = gl.minimum(at + share, gl.load(p_totals + 1))
    job = gl.load(p_first + i_p)
    k = 0
    while at < stop:
        i_r, _, _, _, b_len, before, num_tiles, after = load_job(p_jobs, job)
        begin = gl.maximum(at - before, 0)
        end = gl.minimum(stop - before, num_tiles)
        last_block = (b_len - 1) // S
        p_table = p_tables + i_r.to(gl.int64) * stride_table
        for j in range(begin, end):
            stage = k % STAGES
            rows = gl.tuple(())
            for i in gl.static_range(PIECES):
                i_n = (begin + end - 1 - j) * KEYS + i * BOX
                block = gl.load(p_table + gl.minimum(i_n // S, last_block))
                rows = rows + gl.tuple((block * S + i_n % S,))
            mbarrier.wait(free.index(stage), ((k // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), BYTES)
            for i in gl.static_range(PIECES):
                for c in gl.static_range(COLUMNS):
                    piece = c_pieces.index((stage * COLUMNS + c) * PIECES + i)
                    tma.async_copy_global_to_shared(desc, [rows[i], c * PANEL], ready.index(stage), piece)
                piece = t_pieces.index(stage * PIECES + i)
                tma.async_copy_global_to_shared(desc, [rows[i], LATENT], ready.index(stage), piece)
            k += 1
        at = after
        job += 1


@gluon.jit
def load_queries(
    smem, p_q, first_row, b_start, b_count, stride_q_token, stride_q_head, H: gl.constexpr, LAYOUT: gl.constexpr,
    CUT: gl.constexpr,
):  # fmt: skip
    """(token, head) rows from first_row on: global memory to registers to shared memory. CUT: what bf16 has beyond
    fp16's largest is cut off, as in `query_to_fp8_keys`."""
    o_row = first_row + gl.arange(0, smem.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    o_query = (b_start + o_row // H).to(gl.int64) * stride_q_token + o_row % H * stride_q_head
    p_tile = p_q + o_query[:, None] + gl.arange(0, smem.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    b_q = gl.load(p_tile, mask=(o_row < b_count * H)[:, None], other=0.0)
    if CUT:
        b_q = gl.minimum(gl.maximum(b_q.to(gl.float32), -65504.0), 65504.0).to(gl.float16)
    smem.store(b_q)


@gluon.jit
def last_seen(first_row, b_count, b_len, ROWS: gl.constexpr, H: gl.constexpr, LAYOUT: gl.constexpr):
    """The last position that each row sees. Rows that only pad the tile are not stored."""
    o_token = (first_row + gl.arange(0, ROWS, layout=LAYOUT)) // H
    return b_len - b_count + gl.minimum(o_token, b_count - 1)


@gluon.jit
def attend_partition(
    attend_tiles: gl.constexpr, ROWS_AT: gl.constexpr, q_smem, u_smem, tiles, ready, free, p_q, p_scale, p_out,
    p_partial, p_log_sum, p_jobs, p_first, p_totals, factor, stride_q_token, stride_q_head, stride_out_token,
    stride_out_head, H: gl.constexpr,
):  # fmt: skip
    """Eight warps: the rows of the share's jobs. p_scale [1]: of a cache in fp8, or None."""
    ROWS: gl.constexpr = q_smem.shape[0]
    KEYS_AT: gl.constexpr = 1 - ROWS_AT
    CUT: gl.constexpr = p_scale is not None
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    kv_scale = 1.0
    if p_scale is not None:
        kv_scale = gl.load(p_scale)
        factor = factor * kv_scale
    i_p = gl.program_id(0)
    share = gl.load(p_totals)
    at = i_p * share
    stop = gl.minimum(at + share, gl.load(p_totals + 1))
    job = gl.load(p_first + i_p)
    k = 0
    while at < stop:
        _, first_row, b_start, b_count, b_len, before, num_tiles, after = load_job(p_jobs, job)
        begin = gl.maximum(at - before, 0)
        end = gl.minimum(stop - before, num_tiles)
        if begin < end:
            load_queries(q_smem, p_q, first_row, b_start, b_count, stride_q_token, stride_q_head, H, WIDE, CUT)
            p_turned = p_q + LATENT
            load_queries(u_smem, p_turned, first_row, b_start, b_count, stride_q_token, stride_q_head, H, NARROW, CUT)
            fence_async_shared()
            thread_barrier()
            b_acc, b_max, b_sum, k = attend_tiles(
                tiles, q_smem, u_smem, ready, free, k, begin, end, first_row, b_count, b_len, factor, H
            )
            SUMS: gl.constexpr = b_acc.type.layout
            O_ROW: gl.constexpr = gl.SliceLayout(KEYS_AT, SUMS)
            b_total = gl.where(b_sum > 0, b_sum, 1.0)
            b_log = gl.where(b_sum > 0, b_max + gl.log2(b_total), NO_MAX)
            if p_scale is not None:
                b_acc = b_acc * kv_scale
            b_acc = b_acc / gl.expand_dims(gl.convert_layout(b_total, O_ROW), KEYS_AT)
            o_m = gl.arange(0, ROWS, layout=O_ROW)
            o_row = first_row + o_m
            o_d = gl.arange(0, LATENT, layout=gl.SliceLayout(ROWS_AT, SUMS))
            m_o = gl.expand_dims(o_row < b_count * H, KEYS_AT) & gl.expand_dims(o_d < LATENT, ROWS_AT)
            o_d = gl.expand_dims(o_d, ROWS_AT)
            if end - begin == num_tiles:
                o_out = (b_start + o_row // H).to(gl.int64) * stride_out_token + o_row % H * stride_out_head
                p_rows = p_out + gl.expand_dims(o_out, KEYS_AT)
                gl.store(p_rows + o_d, b_acc.to(p_out.dtype.element_ty), mask=m_o)
            else:
                place = 2 * i_p.to(gl.int64) + gl.where(begin == 0, 1, 0)
                p_part = p_partial + gl.expand_dims(place * ROWS + o_m, KEYS_AT) * LATENT
                gl.store(p_part + o_d, b_acc, mask=m_o)
                o_s = gl.arange(0, ROWS, layout=b_sum.type.layout)
                gl.store(p_log_sum + place * ROWS + o_s, b_log, mask=first_row + o_s < b_count * H)
        at = after
        job += 1


def suits(cache: torch.Tensor, latent_size: int) -> bool:
    """True if the shapes suit: DeepSeek's sizes, blocks of a power of two."""
    block_size, width = cache.shape[1:]
    return (
        cache.is_contiguous()
        and (latent_size, width - latent_size) == (LATENT.value, TURNED.value)
        and block_size >= 8
        and block_size & (block_size - 1) == 0
    )


@dataclass(frozen=True)
class JobKernel:
    """Launches a kernel over shares of such tiles of a cache, which it sees as rows [B * S, R + Dr] of panels."""

    kernel: Any
    tile: AttendTile
    layout: gl.NVMMASharedLayout

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        shares: Shares,
        out: torch.Tensor,
        *,
        scale: float,
        kv_scale: torch.Tensor | None = None,
    ) -> None:
        """The same as `triton_attend.attend`; kv_scale [1]: of a cache in fp8."""
        assert (shares.tile, shares.is_whole) == (self.tile, False)
        rows = cache.view(-1, cache.shape[2])
        box = [min(cache.shape[1], KEYS.value), PANEL.value]
        descriptor = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), box, self.layout)
        self.kernel[(shares.programs,)](
            descriptor, query, kv_scale, out, shares.partials.result, shares.partials.log_sum, meta.block_table,
            shares.jobs, shares.first, shares.totals, scale * LOG2_E, *query.stride()[:2], *out.stride()[:2],
            meta.block_table.stride(0),
            H=query.shape[1], S=cache.shape[1], num_warps=self.tile.num_warps, maxnreg=168,
            **early_launch(query.device),
        )  # fmt: skip
