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

from app.kernels.attention.gluon_pipeline import NO_MAX, PANEL, PANEL_LAYOUT
from app.kernels.kernel_table import Kernel
from app.kernels.mla import gluon_attend
from app.kernels.mla.gluon_jobs import (
    KEYS,
    LATENT,
    TURNED,
    JobKernel,
    attend_partition,
    copy_partition,
    last_seen,
    ring,
    thread_barrier,
)
from app.kernels.mla.triton_schedule import AttendTile
from app.kernels.quick_launch import quick_launch

ROWS = gl.constexpr(16)
STAGES = gl.constexpr(2)
TILE = AttendTile(rows=16, keys=64, num_warps=8, num_stages=2, programs=1)


@gluon.jit
def weigh(b_s, b_max, b_weights, b_acc, p_smem, i_n, o_pos, factor):
    """The online softmax (Milakov and Gimelshein, 2018) of a tile's scores [keys, rows]: weights go to p_smem."""
    o_n = i_n + gl.arange(0, KEYS, layout=gl.SliceLayout(1, b_s.type.layout))
    b_s = gl.where(o_n[:, None] <= o_pos[None, :], b_s, float("-inf"))
    b_new_max = gl.maximum(b_max, gl.max(b_s, 0) * factor)
    b_scale = gl.exp2(b_max - b_new_max)
    b_p = gl.exp2(b_s * factor - b_new_max[None, :])
    b_weights = b_weights * b_scale[None, :] + b_p
    p_smem.store(b_p.to(p_smem.dtype).permute((1, 0)))
    fence_async_shared()
    b_acc = b_acc * gl.convert_layout(b_scale, gl.SliceLayout(0, b_acc.type.layout))[None, :]
    thread_barrier()
    return b_new_max, b_weights, b_acc


@gluon.jit
def attend_tiles(
    tiles, q_smem, u_smem, ready, free, k, begin, end, first_row, b_count, b_len, factor, H: gl.constexpr
):  # fmt: skip
    """Sums of a job's tiles [R, rows], each row's maximum and total."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    p_smem, c_smem, t_smem = tiles
    c_panels = c_smem._reinterpret(c_smem.dtype, [STAGES * (LATENT // PANEL), KEYS, PANEL], c_smem.layout)
    o_pos = last_seen(first_row, b_count, b_len, ROWS, H, S_ROW)
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
        b_max, b_weights, b_acc = weigh(b_s, b_max, b_weights, b_acc, p_smem, i_n, o_pos, factor)
        values = c_smem.index(stage).permute((1, 0))
        b_acc = warpgroup_mma(values, p_smem.permute((1, 0)), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        thread_barrier()  # one thread tells for all
        mbarrier.arrive(free.index(stage), count=1)
        k += 1
    return b_acc, b_max, gl.sum(b_weights, 0), k


@quick_launch
@gluon.jit(do_not_specialize=["stride_table"])
def attend_few_gluon_kernel(
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
                attend_tiles, 1, q_smem, u_smem, (p_smem, c_smem, t_smem), ready, free, p_q, p_scale, p_out, p_partial,
                p_log_sum, p_jobs, p_first, p_totals, factor, stride_q_token, stride_q_head, stride_out_token,
                stride_out_head, H,
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


KERNEL = Kernel(serves, JobKernel(attend_few_gluon_kernel, TILE, PANEL_LAYOUT).attend)
