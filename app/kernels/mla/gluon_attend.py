# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`triton_attend.attend` for Hopper GPUs, written in Gluon: one warp copies latents, eight compute.

The same shares, jobs and partial results. A tile of 64 rows meets tiles of 64 keys, which come into one of two stages
of shared memory while the other one is at work (gluon_jobs.py). The two groups of four warps halve the keys of the
scores and the columns of the result: 64 x 512 sums in fp32 are half of a multiprocessor's registers.
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

from app.kernels.attention.gluon_pipeline import NO_MAX, PANEL, PANEL_LAYOUT
from app.kernels.kernel_table import Kernel
from app.kernels.mla.gluon_jobs import (
    KEYS,
    LATENT,
    TURNED,
    JobKernel,
    attend_partition,
    copy_partition,
    last_seen,
    ring,
    suits,
    thread_barrier,
)
from app.kernels.mla.triton_schedule import AttendTile
from app.kernels.quick_launch import quick_launch

ROWS = gl.constexpr(64)
STAGES = gl.constexpr(2)
TILE = AttendTile(rows=64, keys=64, num_warps=8, num_stages=2, programs=1)


@gluon.jit
def attend_tiles(
    tiles, q_smem, u_smem, ready, free, k, begin, end, first_row, b_count, b_len, factor, H: gl.constexpr
):  # fmt: skip
    """Sums of a job's tiles [rows, R], each row's maximum and total."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    p_smem, c_smem, t_smem = tiles
    c_panels = c_smem._reinterpret(c_smem.dtype, [STAGES * (LATENT // PANEL), KEYS, PANEL], c_smem.layout)
    o_pos = last_seen(first_row, b_count, b_len, ROWS, H, S_ROW)
    b_max = gl.full([ROWS], NO_MAX, gl.float32, S_ROW)
    b_sum = gl.zeros([ROWS], gl.float32, S_ROW)
    b_acc = gl.zeros([ROWS, LATENT], gl.float32, O_LAYOUT)
    for j in range(begin, end):
        stage = k % STAGES
        i_n = (begin + end - 1 - j) * KEYS
        mbarrier.wait(ready.index(stage), (k // STAGES) & 1)
        zeros = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
        b_s = warpgroup_mma(q_smem, c_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_s = warpgroup_mma(u_smem, t_smem.index(stage).permute((1, 0)), b_s, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        if i_n + KEYS > b_len:
            # Slots past the request may hold NaN, which a weight of 0 does not hide.
            o_z = i_n + gl.arange(0, KEYS, layout=gl.SliceLayout(1, NARROW))
            for c in gl.static_range(LATENT // PANEL):
                panel = c_panels.index(stage * (LATENT // PANEL) + c)
                panel.store(gl.where((o_z < b_len)[:, None], panel.load(NARROW), 0.0).to(c_smem.dtype))
        o_n = i_n + gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
        b_s = gl.where(o_n[None, :] <= o_pos[:, None], b_s, float("-inf"))
        b_new_max = gl.maximum(b_max, gl.max(b_s, 1) * factor)
        b_scale = gl.exp2(b_max - b_new_max)
        b_p = gl.exp2(b_s * factor - b_new_max[:, None])
        b_sum = b_sum * b_scale + gl.sum(b_p, 1)
        b_max = b_new_max
        p_smem.store(b_p.to(p_smem.dtype))
        fence_async_shared()
        b_acc = b_acc * gl.convert_layout(b_scale, O_ROW)[:, None]
        thread_barrier()
        b_acc = warpgroup_mma(p_smem, c_smem.index(stage), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        thread_barrier()  # one thread tells for all
        mbarrier.arrive(free.index(stage), count=1)
        k += 1
    return b_acc, b_max, b_sum, k


@quick_launch
@gluon.jit(do_not_specialize=["stride_table"])
def attend_gluon_kernel(
    desc, p_q, p_scale, p_out, p_partial, p_log_sum, p_tables, p_jobs, p_first, p_totals, factor,
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
    ready, free = ring(STAGES)
    gl.warp_specialize(
        [
            (attend_partition, (
                attend_tiles, 0, q_smem, u_smem, (p_smem, c_smem, t_smem), ready, free, p_q, p_scale, p_out, p_partial,
                p_log_sum, p_jobs, p_first, p_totals, factor, stride_q_token, stride_q_head, stride_out_token,
                stride_out_head, H,
            )),
            (copy_partition, (
                desc, c_smem, t_smem, ready, free, p_tables, p_jobs, p_first, p_totals, stride_table, S,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def serves(dtype: torch.dtype, cache: torch.Tensor, latent_size: int, num_rows: int) -> AttendTile | None:
    """`TILE`, if the cache suits and is of 16 bits as the queries are."""
    is_half = dtype in (torch.bfloat16, torch.float16) and cache.dtype == dtype
    return TILE if is_half and suits(cache, latent_size) else None


KERNEL = Kernel(serves, JobKernel(attend_gluon_kernel, TILE, PANEL_LAYOUT).attend)
