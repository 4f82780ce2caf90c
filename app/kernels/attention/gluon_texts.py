# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Causal attention within texts for Hopper GPUs, written in Gluon: the same result as triton_encoder.py, for heads of
128 that share keys in pairs or more.

By the pipeline of gluon_pipeline.py. Most texts are short, so that a program would wait for its first keys as long as
it computes: there is one for each multiprocessor, which attends one tile after another, and its copying warp brings
queries and keys of the next tiles meanwhile. A tile is 64 tokens of two heads that have the same keys. The list of
tiles begins with those that see most; programs take them to and fro, so that each has about as much to do. Heads of 64
with keys of their own were no faster so (benchmarks/RESULTS.md). Triton's interpreter cannot run Gluon; the tests of
this file need the GPU.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.attention.encoder import Sight
from app.kernels.attention.gluon_pipeline import KEYS, LOG2_E, PANEL, PANEL_LAYOUT, ROWS, STAGES, attend_tiles, ring
from app.kernels.kernel_table import Kernel
from app.kernels.launch import multiprocessors
from app.kernels.quick_launch import quick_launch

D = gl.constexpr(128)
COLUMNS = gl.constexpr(2)  # panels of a row of D
AHEAD = gl.constexpr(2)  # tiles of queries that shared memory holds
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # as two versions of Triton name it


@gluon.jit
def nth_job(p_tiles, num_tiles, i, PAIRS: gl.constexpr):
    """The program's i-th: a text's first row, its length (0: there is none), the tile's first token, the pair of
    heads."""
    i_p, count = gl.program_id(0), gl.num_programs(0)
    job = i * count + gl.where(i % 2 == 0, i_p, count - 1 - i_p)
    i_tile = job // PAIRS
    p_tile = p_tiles + gl.minimum(i_tile, num_tiles - 1) * 3
    length = gl.where(i_tile < num_tiles, gl.load(p_tile + 1), 0)
    return gl.load(p_tile), length, gl.load(p_tile + 2), job % PAIRS


@gluon.jit
def copy_rows(desc, pieces, at, bar, row, column):
    """The columns of a head, from `row` on, into shared memory, which holds them panel by panel."""
    for c in gl.static_range(COLUMNS):
        tma.async_copy_global_to_shared(desc, [row, column + c * PANEL], bar, pieces.index(at * COLUMNS + c))


@gluon.jit
def copy_partition(
    d_q, d_k, d_v, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, p_tiles, num_tiles,
    G: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """One warp: all of the program's queries, keys and values. What lies behind a text is its neighbour's, or zeros
    behind the last one."""
    q_pieces = q_smem._reinterpret(d_q.dtype, [AHEAD * 2 * COLUMNS, ROWS, PANEL], d_q.layout)
    k_pieces = k_smem._reinterpret(d_k.dtype, [STAGES * COLUMNS, KEYS, PANEL], d_k.layout)
    v_pieces = v_smem._reinterpret(d_v.dtype, [STAGES * COLUMNS, KEYS, PANEL], d_v.layout)
    i, k = 0, 0
    row, length, first, pair = nth_job(p_tiles, num_tiles, i, PAIRS)
    while length > 0:
        following = nth_job(p_tiles, num_tiles, i + 1, PAIRS)
        place = i % AHEAD
        mbarrier.wait(q_free.index(place), ((i // AHEAD) & 1) ^ 1)
        mbarrier.expect(q_ready.index(place), 2 * ROWS * D * 2)
        for g in gl.static_range(2):
            copy_rows(d_q, q_pieces, place * 2 + g, q_ready.index(place), row + first, (pair * 2 + g) * D)
        column = pair * 2 // G * D
        count = gl.cdiv(gl.minimum(first + ROWS, length), KEYS)
        for j in range(count):
            stage, phase = k % STAGES, ((k // STAGES) & 1) ^ 1
            i_row = row + (count - 1 - j) * KEYS
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_ready.index(stage), KEYS * D * 2)
            copy_rows(d_k, k_pieces, stage, k_ready.index(stage), i_row, column)
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_ready.index(stage), KEYS * D * 2)
            copy_rows(d_v, v_pieces, stage, v_ready.index(stage), i_row, column)
            k += 1
        i += 1
        row, length, first, pair = following


@gluon.jit
def start_scores(queries, keys, stage, S_LAYOUT: gl.constexpr):
    """Scores [ROWS, KEYS] of the keys in a stage, under way."""
    zeros = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    return warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def attend_partition(
    GROUP: gl.constexpr, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, p_out, p_tiles,
    num_tiles, factor, stride_token, stride_head, PAIRS: gl.constexpr,
):  # fmt: skip
    """Four warps: one of the two heads of the program's tiles."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_m = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    i, k = 0, 0
    row, length, first, pair = nth_job(p_tiles, num_tiles, i, PAIRS)
    while length > 0:
        following = nth_job(p_tiles, num_tiles, i + 1, PAIRS)  # on its way meanwhile
        place = i % AHEAD
        queries = q_smem.index(place * 2 + GROUP)
        count = gl.cdiv(gl.minimum(first + ROWS, length), KEYS)
        o_pos = gl.minimum(first + o_row, length - 1)  # the last token that each row sees
        mbarrier.wait(q_ready.index(place), (i // AHEAD) & 1)
        b_acc, _, b_sum = attend_tiles(
            start_scores, queries, k_smem, v_smem, k_ready, v_ready, k_free, v_free, (count - 1) * KEYS, count, 1,
            count, o_pos, 0, length, None, factor, WIDE, k,
        )  # fmt: skip
        mbarrier.arrive(v_free.index((k + count - 1) % STAGES), count=1)  # the others were given back on the way
        b_acc = b_acc / gl.convert_layout(b_sum, gl.SliceLayout(1, b_acc.type.layout))[:, None]
        # Through the queries' place to whole rows: 16 bytes a thread.
        queries.store(b_acc.to(queries.dtype))
        b_out = queries.load(WIDE)
        fence_async_shared()
        thread_barrier()  # all threads have read before one of them says so
        mbarrier.arrive(q_free.index(place), count=1)
        p_rows = p_out + (row + first + o_m).to(gl.int64)[:, None] * stride_token + (pair * 2 + GROUP) * stride_head
        gl.store(p_rows + o_d[None, :], b_out, mask=((first + o_m < length)[:, None]) & (o_d < D)[None, :])
        k += count
        i += 1
        row, length, first, pair = following


@quick_launch
@gluon.jit(do_not_specialize=["num_tiles"])
def text_attention_kernel(
    d_q, d_k, d_v, p_out, p_tiles, num_tiles, factor, stride_token, stride_head, G: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Grid (programs,): p_tiles int32 [num_tiles, 3] as `triton_encoder.encoder_kernel` has them. The descriptors see
    rows [T, H * D]; factor turns scores to base 2."""
    q_smem = gl.allocate_shared_memory(d_q.dtype, [AHEAD * 2, ROWS, D], d_q.layout)
    k_smem = gl.allocate_shared_memory(d_k.dtype, [STAGES, KEYS, D], d_k.layout)
    v_smem = gl.allocate_shared_memory(d_v.dtype, [STAGES, KEYS, D], d_v.layout)
    q_ready, q_free = ring()
    k_ready, k_free = ring()
    v_ready, v_free = ring()
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend_partition, (
                0, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, p_out, p_tiles,
                num_tiles, factor, stride_token, stride_head, PAIRS,
            )),
            (attend_partition, (
                1, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, p_out, p_tiles,
                num_tiles, factor, stride_token, stride_head, PAIRS,
            )),
            (copy_partition, (
                d_q, d_k, d_v, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, p_tiles,
                num_tiles, G, PAIRS,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sight: Sight) -> bool:
    """True if the shapes suit: 16 bits, an even number of heads for each of keys, rows of whole heads."""
    rows = (query, key, value)
    return (
        sight.is_causal
        and sight.window is None
        and sight.seen is None
        and query.shape[2] == D.value
        and query.shape[1] // key.shape[1] % 2 == 0
        and query.dtype in (torch.bfloat16, torch.float16)
        and all(x.stride()[1:] == (D.value, 1) and x.stride(0) % 8 == x.data_ptr() % 16 == 0 for x in rows)
    )


def launch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, tiles: torch.Tensor, sight: Sight
) -> None:
    """The same as `triton_encoder.launch`, where `serves` agrees."""
    num_heads, num_tiles = query.shape[1], len(tiles)
    if not num_tiles:
        return
    d_q, d_k, d_v = (
        TensorDescriptor(x, [len(x), x.shape[1] * D.value], [x.stride(0), 1], [height, PANEL.value], PANEL_LAYOUT)
        for x, height in ((query, ROWS.value), (key, KEYS.value), (value, KEYS.value))
    )
    programs = min(multiprocessors(query.device), num_tiles * (num_heads // 2))
    text_attention_kernel[(programs,)](
        d_q, d_k, d_v, out, tiles, num_tiles, sight.scale * LOG2_E, *out.stride()[:2],
        G=num_heads // key.shape[1], PAIRS=num_heads // 2, num_warps=4, maxnreg=168,
    )  # fmt: skip


KERNEL = Kernel(serves, launch)
