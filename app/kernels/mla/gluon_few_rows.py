# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`gluon_attend` for few (token, head) rows: a decode step's 16 heads or less.

The tensor cores take 64 rows at a time, of which 16 heads would fill a quarter. Here keys are the rows and heads the
columns: scores are [keys, heads], and the result is summed as [R, heads], of the same tile of latents turned round.
Eight warps compute: two groups of four halve the heads of the scores and the rows of the result.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.attention import AttentionMetadata
from app.kernels.attention.gluon_prefill import LOG2_E, NO_MAX, PANEL, PANEL_LAYOUT
from app.kernels.kernel_table import Kernel
from app.kernels.launch import early_launch
from app.kernels.mla import gluon_attend
from app.kernels.mla.gluon_attend import KEYS, LATENT, STAGES, TURNED, copy_partition, load_job, thread_barrier
from app.kernels.mla.triton_schedule import AttendTile, Shares
from app.kernels.quick_launch import quick_launch

ROWS = gl.constexpr(16)
TILE = AttendTile(rows=16, keys=64, num_warps=8, num_stages=2, programs=1)


@gluon.jit
def attend_partition(
    q_smem, u_smem, p_smem, c_smem, t_smem, ready, free, p_q, p_out, p_partial, p_log_sum, p_jobs, p_first, p_totals,
    factor, stride_q_token, stride_q_head, stride_out_token, stride_out_head, H: gl.constexpr,
):  # fmt: skip
    """Eight warps: the rows of the share's jobs."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(0, O_LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    c_panels = c_smem._reinterpret(c_smem.dtype, [STAGES * (LATENT // PANEL), KEYS, PANEL], c_smem.layout)
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
            # The queries: global memory to registers to shared memory.
            o_w = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
            o_query = (b_start + o_w // H).to(gl.int64) * stride_q_token + o_w % H * stride_q_head
            p_tile = p_q + o_query[:, None] + gl.arange(0, LATENT, layout=gl.SliceLayout(0, WIDE))[None, :]
            q_smem.store(gl.load(p_tile, mask=(o_w < b_count * H)[:, None], other=0.0))
            o_w = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, NARROW))
            o_query = (b_start + o_w // H).to(gl.int64) * stride_q_token + o_w % H * stride_q_head
            p_tile = p_q + LATENT + o_query[:, None] + gl.arange(0, TURNED, layout=gl.SliceLayout(0, NARROW))[None, :]
            u_smem.store(gl.load(p_tile, mask=(o_w < b_count * H)[:, None], other=0.0))
            fence_async_shared()
            thread_barrier()
            # The last position that each row sees. Rows that only pad the tile are not stored.
            o_token = (first_row + gl.arange(0, ROWS, layout=S_ROW)) // H
            o_pos = b_len - b_count + gl.minimum(o_token, b_count - 1)
            b_max = gl.full([ROWS], NO_MAX, gl.float32, S_ROW)
            b_weights = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)  # sums of each thread's own keys
            b_acc = gl.zeros([LATENT, ROWS], gl.float32, O_LAYOUT)
            for j in range(begin, end):
                stage = k % STAGES
                i_n = (begin + end - 1 - j) * KEYS
                mbarrier.wait(ready.index(stage), (k // STAGES) & 1)
                zeros = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
                b_s = warpgroup_mma(c_smem.index(stage), q_smem.permute((1, 0)), zeros, use_acc=False, is_async=True)
                b_s = warpgroup_mma(t_smem.index(stage), u_smem.permute((1, 0)), b_s, is_async=True)
                b_s = warpgroup_mma_wait(0, deps=[b_s])
                if i_n + KEYS > b_len:
                    # Slots past the request may hold NaN, which a weight of 0 does not hide.
                    o_z = i_n + gl.arange(0, KEYS, layout=gl.SliceLayout(1, NARROW))
                    for c in gl.static_range(LATENT // PANEL):
                        panel = c_panels.index(stage * (LATENT // PANEL) + c)
                        panel.store(gl.where((o_z < b_len)[:, None], panel.load(NARROW), 0.0).to(c_smem.dtype))
                o_n = i_n + gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
                b_s = gl.where(o_n[:, None] <= o_pos[None, :], b_s, float("-inf"))
                b_new_max = gl.maximum(b_max, gl.max(b_s, 0) * factor)
                b_scale = gl.exp2(b_max - b_new_max)
                b_p = gl.exp2(b_s * factor - b_new_max[None, :])
                b_weights = b_weights * b_scale[None, :] + b_p
                b_max = b_new_max
                p_smem.store(b_p.to(p_smem.dtype).permute((1, 0)))
                fence_async_shared()
                b_acc = b_acc * gl.convert_layout(b_scale, O_ROW)[None, :]
                thread_barrier()
                values = c_smem.index(stage).permute((1, 0))
                b_acc = warpgroup_mma(values, p_smem.permute((1, 0)), b_acc, is_async=True)
                b_acc = warpgroup_mma_wait(0, deps=[b_acc])
                thread_barrier()  # one thread tells for all
                mbarrier.arrive(free.index(stage), count=1)
                k += 1
            b_sum = gl.sum(b_weights, 0)
            b_total = gl.where(b_sum > 0, b_sum, 1.0)
            b_log = gl.where(b_sum > 0, b_max + gl.log2(b_total), NO_MAX)
            b_acc = b_acc / gl.convert_layout(b_total, O_ROW)[None, :]
            o_m = gl.arange(0, ROWS, layout=O_ROW)
            o_row = first_row + o_m
            o_d = gl.arange(0, LATENT, layout=gl.SliceLayout(1, O_LAYOUT))
            m_o = (o_row < b_count * H)[None, :] & (o_d < LATENT)[:, None]
            if end - begin == num_tiles:
                o_out = (b_start + o_row // H).to(gl.int64) * stride_out_token + o_row % H * stride_out_head
                gl.store(p_out + o_out[None, :] + o_d[:, None], b_acc.to(p_out.dtype.element_ty), mask=m_o)
            else:
                place = 2 * i_p.to(gl.int64) + gl.where(begin == 0, 1, 0)
                gl.store(p_partial + (place * ROWS + o_m)[None, :] * LATENT + o_d[:, None], b_acc, mask=m_o)
                o_s = gl.arange(0, ROWS, layout=S_ROW)
                gl.store(p_log_sum + place * ROWS + o_s, b_log, mask=first_row + o_s < b_count * H)
        at = after
        job += 1


@quick_launch
@gluon.jit(do_not_specialize=["stride_table"])
def attend_few_gluon_kernel(
    desc, p_q, p_out, p_partial, p_log_sum, p_tables, p_jobs, p_first, p_totals, factor,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_table,
    H: gl.constexpr, S: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): a share each. `desc` sees the cache as rows [B * S, R + Dr]; factor turns scores to base 2."""
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    q_smem = gl.allocate_shared_memory(desc.dtype, [ROWS, LATENT], desc.layout)
    u_smem = gl.allocate_shared_memory(desc.dtype, [ROWS, TURNED], desc.layout)
    p_smem = gl.allocate_shared_memory(desc.dtype, [ROWS, KEYS], desc.layout)
    c_smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, LATENT], desc.layout)
    t_smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, TURNED], desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend_partition, (
                q_smem, u_smem, p_smem, c_smem, t_smem, ready, free, p_q, p_out, p_partial, p_log_sum, p_jobs, p_first,
                p_totals, factor, stride_q_token, stride_q_head, stride_out_token, stride_out_head, H,
            )),
            (copy_partition, (
                desc, c_smem, t_smem, ready, free, p_tables, p_jobs, p_first, p_totals, stride_table, S,
            )),
        ],
        [1],
        [56],
    )  # fmt: skip


def serves(dtype: torch.dtype, cache: torch.Tensor, latent_size: int, num_rows: int) -> AttendTile | None:
    """`TILE`, if the shapes suit, and a request has at most so many (token, head) rows."""
    return TILE if num_rows <= TILE.rows and gluon_attend.serves(dtype, cache, latent_size, num_rows) else None


def attend(
    query: torch.Tensor,
    cache: torch.Tensor,
    meta: AttentionMetadata,
    shares: Shares,
    out: torch.Tensor,
    *,
    scale: float,
    kv_scale: torch.Tensor | None = None,
) -> None:
    """The same as `gluon_attend.attend`, where `serves` agrees and the shares are of tiles like `TILE`."""
    assert (shares.tile, shares.is_whole) == (TILE, False)
    rows = cache.view(-1, cache.shape[2])
    box = [min(cache.shape[1], KEYS.value), PANEL.value]
    descriptor = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), box, PANEL_LAYOUT)
    attend_few_gluon_kernel[(shares.programs,)](
        descriptor, query, out, shares.partials.result, shares.partials.log_sum, meta.block_table, shares.jobs,
        shares.first, shares.totals, scale * LOG2_E, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        meta.block_table.stride(0),
        H=query.shape[1], S=cache.shape[1], num_warps=8, maxnreg=168,
        **early_launch(query.device),
    )  # fmt: skip


KERNEL = Kernel(serves, attend)
