# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`gluon_few_rows` for latents kept in fp8: the same products, of tiles that eight warps bring to fp16 first.

One warp copies bytes into three stages; the others unpack a stage, let the copying warp have it again, and multiply.
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

from app.kernels.attention import KV_FP8
from app.kernels.attention.gluon_pipeline import NO_MAX, PANEL, PANEL_LAYOUT
from app.kernels.kernel_table import Kernel
from app.kernels.mla.gluon_few_rows import ROWS, weigh
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

STAGES = gl.constexpr(3)
TILE = AttendTile(rows=16, keys=64, num_warps=8, num_stages=3, programs=1)
BYTES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)


@gluon.jit
def attend_tiles(
    tiles, q_smem, u_smem, ready, free, k, begin, end, first_row, b_count, b_len, factor, H: gl.constexpr
):  # fmt: skip
    """Sums of a job's tiles [R, rows], each row's maximum and total."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    S_ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [8, 1], [1, 0])
    p_smem, f_smem, g_smem, c_smem, t_smem = tiles
    DTYPE: gl.constexpr = c_smem.dtype
    PANELS: gl.constexpr = LATENT // PANEL
    f_panels = f_smem._reinterpret(f_smem.dtype, [STAGES * PANELS, KEYS, PANEL], f_smem.layout)
    c_panels = c_smem._reinterpret(DTYPE, [PANELS, KEYS, PANEL], c_smem.layout)
    o_pos = last_seen(first_row, b_count, b_len, ROWS, H, S_ROW)
    b_max = gl.full([ROWS], NO_MAX, gl.float32, S_ROW)
    b_weights = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)  # sums of each thread's own keys
    b_acc = gl.zeros([LATENT, ROWS], gl.float32, O_LAYOUT)
    for j in range(begin, end):
        stage = k % STAGES
        i_n = (begin + end - 1 - j) * KEYS
        mbarrier.wait(ready.index(stage), (k // STAGES) & 1)
        if i_n + KEYS > b_len:
            # Slots past the request may hold NaN, which a weight of 0 does not hide.
            o_z = i_n + gl.arange(0, KEYS, layout=gl.SliceLayout(1, BYTES))
            for c in gl.static_range(PANELS):
                b_c = f_panels.index(stage * PANELS + c).load(BYTES).to(DTYPE)
                c_panels.index(c).store(gl.where((o_z < b_len)[:, None], b_c, 0.0))
        else:
            for c in gl.static_range(PANELS):
                c_panels.index(c).store(f_panels.index(stage * PANELS + c).load(BYTES).to(DTYPE))
        t_smem.store(g_smem.index(stage).load(BYTES).to(DTYPE))
        fence_async_shared()
        thread_barrier()  # one thread tells for all
        mbarrier.arrive(free.index(stage), count=1)
        zeros = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
        b_s = warpgroup_mma(c_smem, q_smem.permute((1, 0)), zeros, use_acc=False, is_async=True)
        b_s = warpgroup_mma(t_smem, u_smem.permute((1, 0)), b_s, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[b_s])
        b_max, b_weights, b_acc = weigh(b_s, b_max, b_weights, b_acc, p_smem, i_n, o_pos, factor)
        b_acc = warpgroup_mma(c_smem.permute((1, 0)), p_smem.permute((1, 0)), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        thread_barrier()  # the tile is overwritten next
        k += 1
    return b_acc, b_max, gl.sum(b_weights, 0), k


@quick_launch
@gluon.jit(do_not_specialize=["stride_table"])
def attend_few_fp8_kernel(
    desc, p_q, p_scale, p_out, p_partial, p_log_sum, p_tables, p_jobs, p_first, p_totals, factor,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_table,
    H: gl.constexpr, S: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): a share each. `desc` sees the cache as rows [B * S, R + Dr]; factor turns scores to base 2."""
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    DTYPE: gl.constexpr = gl.float16
    q_smem = gl.allocate_shared_memory(DTYPE, [ROWS, LATENT], PANEL_LAYOUT)
    u_smem = gl.allocate_shared_memory(DTYPE, [ROWS, TURNED], PANEL_LAYOUT)
    p_smem = gl.allocate_shared_memory(DTYPE, [ROWS, KEYS], PANEL_LAYOUT)
    f_smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, LATENT], desc.layout)
    g_smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, TURNED], desc.layout)
    c_smem = gl.allocate_shared_memory(DTYPE, [KEYS, LATENT], PANEL_LAYOUT)
    t_smem = gl.allocate_shared_memory(DTYPE, [KEYS, TURNED], PANEL_LAYOUT)
    ready, free = ring(STAGES)
    gl.warp_specialize(
        [
            (attend_partition, (
                attend_tiles, 1, q_smem, u_smem, (p_smem, f_smem, g_smem, c_smem, t_smem), ready, free, p_q, p_scale,
                p_out, p_partial, p_log_sum, p_jobs, p_first, p_totals, factor, stride_q_token, stride_q_head,
                stride_out_token, stride_out_head, H,
            )),
            (copy_partition, (
                desc, f_smem, g_smem, ready, free, p_tables, p_jobs, p_first, p_totals, stride_table, S,
            )),
        ],
        [1],
        [56],
    )  # fmt: skip


def serves(dtype: torch.dtype, cache: torch.Tensor, latent_size: int, num_rows: int) -> AttendTile | None:
    """`TILE`, if the cache is fp8 and suits, and a request has at most so many (token, head) rows."""
    is_served = cache.dtype == KV_FP8 and num_rows <= TILE.rows and dtype in (torch.bfloat16, torch.float16)
    return TILE if is_served and suits(cache, latent_size) else None


KERNEL = Kernel(serves, JobKernel(attend_few_fp8_kernel, TILE, BYTES_LAYOUT).attend)
