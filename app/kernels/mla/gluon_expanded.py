# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`triton_expanded.attend_chunk` for Hopper GPUs, written in Gluon: the pipeline of gluon_pipeline.py for keys of 128
numbers of a head's own and 64 that all heads share, and values of 128.

Keys and values lie in a row, so one copy brings a panel of a whole tile. Tiles of keys go from the last to the first:
the ones that need a mask come first. Triton's interpreter cannot run Gluon; the tests of this file need the GPU.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.attention import AttentionMetadata
from app.kernels.attention.gluon_pipeline import (
    KEYS,
    LOG2_E,
    NO_MAX,
    PANEL,
    PANEL_LAYOUT,
    ROWS,
    STAGES,
    attend_tiles,
    ring,
)
from app.kernels.kernel_table import Kernel
from app.kernels.launch import cdiv
from app.kernels.mla.triton_expanded import Carried, Chunk
from app.kernels.quick_launch import quick_launch

NOPE = gl.constexpr(128)  # Dn
TURNED = gl.constexpr(64)  # Dr
VALUE = gl.constexpr(128)  # Dv


@gluon.jit
def copy_panels(desc, smem, bar, stage, row, column, COLUMNS: gl.constexpr):
    """COLUMNS panels of a tile of keys from `row` and `column` on, into a stage."""
    panels = smem._reinterpret(desc.dtype, [STAGES * COLUMNS, KEYS, PANEL], desc.layout)
    for c in gl.static_range(COLUMNS):
        place = panels.index(stage * COLUMNS + c)
        tma.async_copy_global_to_shared(desc, [row, column + c * PANEL], bar, place)


@gluon.jit
def copy_partition(
    desc, turned_desc, k_smem, t_smem, v_smem, k_ready, v_ready, k_free, v_free, first_row, column, num_tiles,
    LATENT: gl.constexpr,
):  # fmt: skip
    """One warp: all tiles of keys and values, the last first. What lies behind the chunk reads as zeros."""
    for j in range(num_tiles):
        stage = j % STAGES
        phase = ((j // STAGES) & 1) ^ 1
        row = first_row + (num_tiles - 1 - j) * KEYS
        mbarrier.wait(k_free.index(stage), phase)
        mbarrier.expect(k_ready.index(stage), KEYS * (NOPE + TURNED) * 2)
        copy_panels(desc, k_smem, k_ready.index(stage), stage, row, column, NOPE // PANEL)
        copy_panels(turned_desc, t_smem, k_ready.index(stage), stage, row, LATENT, TURNED // PANEL)
        mbarrier.wait(v_free.index(stage), phase)
        mbarrier.expect(v_ready.index(stage), KEYS * VALUE * 2)
        copy_panels(desc, v_smem, v_ready.index(stage), stage, row, column + NOPE, VALUE // PANEL)


@gluon.jit
def start_scores(queries, keys, stage, S_LAYOUT: gl.constexpr):
    """Scores [ROWS, KEYS] of the keys in a stage, of a head's own numbers and of those that all share, under way."""
    q_smem, u_smem = queries
    k_smem, t_smem = keys
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    b_s = warpgroup_mma(q_smem, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(u_smem, t_smem.index(stage).permute((1, 0)), b_s, is_async=True)


@gluon.jit
def attend_partition(
    GROUP: gl.constexpr, q_all, u_all, k_smem, t_smem, v_smem, k_ready, v_ready, k_free, v_free, p_q, p_out, p_result,
    p_log_sum, factor, i_head, i_q, b_start, b_count, b_len, begin, end, num_tiles, num_masked,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, H: gl.constexpr,
):  # fmt: skip
    """Four warps: rows [GROUP * ROWS, (GROUP + 1) * ROWS) of the program's tile."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_smem, u_smem = q_all.index(GROUP), u_all.index(GROUP)
    # The queries: global memory to registers to shared memory.
    o_m = i_q * (2 * ROWS) + GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    o_d = gl.arange(0, NOPE, layout=gl.SliceLayout(0, WIDE))
    p_tile = p_q + ((b_start + o_m).to(gl.int64) * stride_q_token + i_head * stride_q_head)[:, None] + o_d[None, :]
    q_smem.store(gl.load(p_tile, mask=(o_m < b_count)[:, None], other=0.0))
    o_n = i_q * (2 * ROWS) + GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, NARROW))
    o_t = NOPE + gl.arange(0, TURNED, layout=gl.SliceLayout(0, NARROW))
    p_tile = p_q + ((b_start + o_n).to(gl.int64) * stride_q_token + i_head * stride_q_head)[:, None] + o_t[None, :]
    u_smem.store(gl.load(p_tile, mask=(o_n < b_count)[:, None], other=0.0))
    fence_async_shared()
    # The last position of the chunk that each row sees; rows that only pad the tile are not stored.
    o_row = i_q * (2 * ROWS) + GROUP * ROWS + gl.arange(0, ROWS, layout=ROW_LAYOUT)
    o_pos = gl.minimum(b_len - b_count + o_row, end - 1)
    b_acc, b_max, b_sum = attend_tiles(
        start_scores, (q_smem, u_smem), (k_smem, t_smem), v_smem, k_ready, v_ready, k_free, v_free,
        begin + (num_tiles - 1) * KEYS, num_tiles, num_masked, num_tiles, o_pos, 0, end, None, factor, WIDE,
    )  # fmt: skip
    O_LAYOUT: gl.constexpr = b_acc.type.layout
    b_total = gl.where(b_sum > 0, b_sum, 1.0)  # some rows may see nothing of the chunk
    b_acc = b_acc / gl.convert_layout(b_total, gl.SliceLayout(1, O_LAYOUT))[:, None]
    is_last = b_len - b_count + gl.minimum((i_q + 1) * (2 * ROWS), b_count) <= end
    if (begin > 0) | (is_last == 0):
        p_log = p_log_sum + (b_start + o_row).to(gl.int64) * H + i_head
        b_log = gl.where(b_sum > 0, b_max + gl.log2(b_total), NO_MAX)
        o_r = b_start + i_q * (2 * ROWS) + GROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
        o_v = gl.arange(0, VALUE, layout=gl.SliceLayout(0, O_LAYOUT))
        p_before = p_result + ((o_r.to(gl.int64) * H + i_head) * VALUE)[:, None] + o_v[None, :]
        m_o = (o_r < b_start + b_count)[:, None] & (o_v < VALUE)[None, :]
        if begin > 0:
            b_old = gl.load(p_log, mask=o_row < b_count, other=0.0)
            b_new = gl.maximum(b_old, b_log)
            b_left, b_right = gl.exp2(b_old - b_new), gl.exp2(b_log - b_new)
            b_log = b_new + gl.log2(b_left + b_right)
            b_left = gl.convert_layout(b_left / (b_left + b_right), gl.SliceLayout(1, O_LAYOUT))
            b_acc = gl.load(p_before, mask=m_o, other=0.0) * b_left[:, None] + b_acc * (1.0 - b_left)[:, None]
        if is_last == 0:
            gl.store(p_before, b_acc, mask=m_o)
            gl.store(p_log, b_log, mask=o_row < b_count)
    if is_last:
        # Through the queries' place to whole rows: 16 bytes a thread.
        q_smem.store(b_acc.to(q_smem.dtype))
        p_o = p_out + ((b_start + o_m).to(gl.int64) * stride_out_token + i_head * stride_out_head)[:, None]
        gl.store(p_o + o_d[None, :], q_smem.load(WIDE), mask=(o_m < b_count)[:, None] & (o_d < VALUE)[None, :])


@quick_launch
@gluon.jit(do_not_specialize=["first", "size"])
def expanded_gluon_kernel(
    desc, turned_desc, p_q, p_out, p_result, p_log_sum, p_query_start_loc, p_offsets, p_lens, factor, first, size,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, H: gl.constexpr, LATENT: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of the longest query, H, requests). `desc` sees a chunk's keys and values as rows [size, H * (Dn +
    Dv)], `turned_desc` its latents [size, R + Dr]; factor turns scores to base 2. Late tiles start first."""
    BQ: gl.constexpr = 2 * ROWS  # tokens of a tile
    i_head = gl.program_id(1)
    i_r = gl.program_id(2)
    b_start = gl.load(p_query_start_loc + i_r)
    b_count = gl.load(p_query_start_loc + i_r + 1) - b_start
    b_offset = gl.load(p_offsets + i_r)
    b_len = gl.load(p_lens + i_r)
    i_q = gl.cdiv(b_count, BQ) - 1 - gl.program_id(0)
    begin = gl.maximum(first - b_offset, 0)  # the chunk's part of the context
    end = gl.minimum(first + size - b_offset, b_len)
    first_pos = b_len - b_count + i_q * BQ
    hi = gl.minimum(b_len - b_count + gl.minimum((i_q + 1) * BQ, b_count), end)
    if (i_q >= 0) & (begin < hi):
        num_tiles = gl.cdiv(hi - begin, KEYS)
        # The others are seen by all rows.
        num_masked = num_tiles - gl.maximum(gl.minimum(first_pos + 1, end) - begin, 0) // KEYS
        q_smem = gl.allocate_shared_memory(desc.dtype, [2, ROWS, NOPE], desc.layout)
        u_smem = gl.allocate_shared_memory(desc.dtype, [2, ROWS, TURNED], desc.layout)
        k_smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, NOPE], desc.layout)
        t_smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, TURNED], desc.layout)
        v_smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, VALUE], desc.layout)
        k_ready, k_free = ring()
        v_ready, v_free = ring()
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_partition, (
                    0, q_smem, u_smem, k_smem, t_smem, v_smem, k_ready, v_ready, k_free, v_free, p_q, p_out, p_result,
                    p_log_sum, factor, i_head, i_q, b_start, b_count, b_len, begin, end, num_tiles, num_masked,
                    stride_q_token, stride_q_head, stride_out_token, stride_out_head, H,
                )),
                (attend_partition, (
                    1, q_smem, u_smem, k_smem, t_smem, v_smem, k_ready, v_ready, k_free, v_free, p_q, p_out, p_result,
                    p_log_sum, factor, i_head, i_q, b_start, b_count, b_len, begin, end, num_tiles, num_masked,
                    stride_q_token, stride_q_head, stride_out_token, stride_out_head, H,
                )),
                (copy_partition, (
                    desc, turned_desc, k_smem, t_smem, v_smem, k_ready, v_ready, k_free, v_free,
                    b_offset + begin - first, i_head * (NOPE + VALUE), num_tiles, LATENT,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def serves(query: torch.Tensor, up: torch.Tensor, value_dim: int) -> bool:
    """True if the shapes suit: 16 bits, DeepSeek's sizes."""
    nope = up.shape[1] - value_dim
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and (nope, query.shape[2] - nope, value_dim) == (NOPE.value, TURNED.value, VALUE.value)
        and up.shape[2] % 8 == 0
    )


def attend_chunk(
    query: torch.Tensor,
    meta: AttentionMetadata,
    offsets: torch.Tensor,
    chunk: Chunk,
    carried: Carried,
    out: torch.Tensor,
    scale: float,
) -> None:
    """The same as `triton_expanded.attend_chunk`, where `serves` agrees."""
    num_heads, box = query.shape[1], [KEYS.value, PANEL.value]
    rows = chunk.expanded.flatten(1)
    descriptor, turned = (
        TensorDescriptor(x, list(x.shape), list(x.stride()), box, PANEL_LAYOUT) for x in (rows, chunk.latents)
    )
    grid = (cdiv(meta.max_query_len, 2 * ROWS.value), num_heads, meta.seq_lens.shape[0])
    expanded_gluon_kernel[grid](
        descriptor, turned, query, out, carried.result, carried.log_sum, meta.query_start_loc, offsets, meta.seq_lens,
        scale * LOG2_E, chunk.first, chunk.size, query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        H=num_heads, LATENT=chunk.latents.shape[1] - TURNED.value, num_warps=4, maxnreg=168,
    )  # fmt: skip


KERNEL = Kernel(serves, attend_chunk)
