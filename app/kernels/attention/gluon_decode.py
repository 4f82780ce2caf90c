# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Split-KV decode of captured steps of many requests on Hopper GPUs, in Gluon: the splits of a list, in programs that
stay.

One warp draws a split and a KV head after the other, and copies its keys and values by the GPU's copy engine (TMA) into
a ring of stages, into the next split while this one is attended to; four warps attend, as `triton_decode.attend_split`
does. Where a context has several splits, the program that finishes the last of them merges what they gave. Triton's
interpreter cannot run Gluon.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from app.kernels.attention import triton_splits
from app.kernels.attention.gluon_pipeline import LOG2_E, NO_MAX, PANEL, PANEL_LAYOUT
from app.kernels.attention.triton_decode import DecodeCall
from app.kernels.kernel_table import Kernel
from app.kernels.launch import early_launch, multiprocessors, next_power_of_2
from app.kernels.quick_launch import quick_launch

KEYS = gl.constexpr(64)  # of a stage
D = gl.constexpr(128)
ROWS = gl.constexpr(16)  # the least that the tensor cores take
STAGES, REGISTERS, PER_MULTIPROCESSOR = 4, 80, 3  # programs of 64 KB and 256 threads
LEAST_HEADS = 64  # KV heads of all requests
NOTHING = gl.constexpr(1 << 32)  # the item behind the last one: a token of the first request
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # as two versions of Triton name it


@gluon.jit
def release(free):
    """Lets the copy engine write where plain loads have read, once these have come (`whole_step/gluon_ring.py`)."""
    fence_async_shared()
    mbarrier.arrive(free, count=1)


@gluon.jit
def bounds_of(low, b_len, MAX_SPLITS: gl.constexpr, SPLIT_KEYS: gl.constexpr):
    """(request, split, its first position, its end, splits of the request) of an item of the list."""
    num_splits = gl.minimum(gl.cdiv(b_len, SPLIT_KEYS), MAX_SPLITS)
    split = gl.cdiv(gl.cdiv(b_len, num_splits), KEYS) * KEYS
    i_split = low % MAX_SPLITS
    begin = i_split * split
    return low // MAX_SPLITS, i_split, begin, gl.minimum(begin + split, b_len), gl.cdiv(b_len, split)


@gluon.jit
def range_of(item, p_tables, stride_table, MAX_SPLITS: gl.constexpr, SPLIT_KEYS: gl.constexpr):
    """(the blocks of its request, its first position, its end) of an item of the list."""
    i_r, _, begin, end, _ = bounds_of(item.to(gl.int32), (item >> 32).to(gl.int32), MAX_SPLITS, SPLIT_KEYS)
    return p_tables + i_r.to(gl.int64) * stride_table, begin, end


@gluon.jit
def blocks_of(p_table, i_n, end, PIECE: gl.constexpr, PIECES: gl.constexpr, S: gl.constexpr):
    """Blocks of a tile's pieces."""
    blocks = gl.tuple(())
    for j in gl.static_range(PIECES):
        i_piece = gl.minimum(i_n + j * PIECE, end - 1)
        blocks = blocks + gl.tuple((gl.load(p_table + i_piece // S),))
    return blocks


@gluon.jit
def draw(p_turn, total):
    """The next split and head. Each program draws one that is too many: whoever draws the last of these leaves 0."""
    programs = gl.num_programs(0)
    drawn = gl.atomic_add(p_turn, 1, sem="relaxed", scope="gpu") + programs
    if drawn == gl.maximum(total, programs) + programs - 1:
        gl.store(p_turn, 0)
    return drawn


@gluon.jit
def copy_partition(
    desc, smem, said, ready, free, p_items, p_count, p_turn, p_tables, stride_table,
    HKV: gl.constexpr, S: gl.constexpr, STAGES: gl.constexpr, MAX_SPLITS: gl.constexpr, SPLIT_KEYS: gl.constexpr,
):  # fmt: skip
    """One warp: what this program draws."""
    PIECE: gl.constexpr = desc.block_shape[0]
    PIECES: gl.constexpr = KEYS // PIECE
    COLUMNS: gl.constexpr = D // PANEL
    WORDS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    pieces = smem._reinterpret(desc.dtype, [STAGES * COLUMNS * PIECES, PIECE, PANEL], desc.layout)
    o_word = gl.arange(0, 4, layout=WORDS)
    total = gl.load(p_count) * HKV
    turn = gl.program_id(0)
    item = gl.load(p_items + turn // HKV, mask=turn < total, other=NOTHING)
    following = draw(p_turn, total)
    next_item = gl.load(p_items + following // HKV, mask=following < total, other=NOTHING)
    p_table, i_n, end = range_of(item, p_tables, stride_table, MAX_SPLITS, SPLIT_KEYS)
    blocks = blocks_of(p_table, i_n, end, PIECE, PIECES, S)
    k = 0
    while turn < total:
        here, here_n, here_end, here_item, here_turn = blocks, i_n, end, item, turn
        i_n = i_n + KEYS
        if i_n >= end:  # the next tile is another split's; what is drawn comes a split ahead
            turn, item = following, next_item
            if following < total:
                following = draw(p_turn, total)
            next_item = gl.load(p_items + following // HKV, mask=following < total, other=NOTHING)
            p_table, i_n, end = range_of(item, p_tables, stride_table, MAX_SPLITS, SPLIT_KEYS)
        blocks = blocks_of(p_table, i_n, end, PIECE, PIECES, S)
        for part in gl.static_range(2):
            stage = k % STAGES
            mbarrier.wait(free.index(stage), ((k // STAGES) & 1) ^ 1)
            if part == 0:
                low, b_len = here_item.to(gl.int32), (here_item >> 32).to(gl.int32)
                b_said = gl.where(o_word == 0, here_turn, gl.where(o_word == 1, low, b_len))
                said.index(stage).store(b_said)
                thread_barrier()
            for j in gl.static_range(PIECES):
                i_piece = here_n + j * PIECE
                seen = i_piece < here_end
                mbarrier.expect(ready.index(stage), PIECE * D * 2, pred=seen)
                mbarrier.arrive(ready.index(stage), count=1, pred=i_piece >= here_end)
                row = ((here[j] * 2 + part) * HKV + here_turn % HKV) * S + i_piece % S
                for c in gl.static_range(COLUMNS):
                    piece = pieces.index((stage * COLUMNS + c) * PIECES + j)
                    tma.async_copy_global_to_shared(desc, [row, c * PANEL], ready.index(stage), piece, pred=seen)
            k += 1
    stage = k % STAGES
    mbarrier.wait(free.index(stage), ((k // STAGES) & 1) ^ 1)
    said.index(stage).store(gl.full([4], -1, gl.int32, WORDS))
    thread_barrier()
    mbarrier.arrive(ready.index(stage), count=PIECES)


@gluon.jit
def take(said, ready, k, STAGES: gl.constexpr):
    """Returns what stands beside the next split's first stage: (its number in the list and head or -1, request and
    split, length of the context)."""
    SAID: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    stage = k % STAGES
    mbarrier.wait(ready.index(stage), (k // STAGES) & 1)
    b_said = said.index(stage).load(SAID)
    o = gl.arange(0, 4, layout=SAID)
    return (
        gl.sum(gl.where(o == 0, b_said, 0), 0),
        gl.sum(gl.where(o == 1, b_said, 0), 0),
        gl.sum(gl.where(o == 2, b_said, 0), 0),
    )


@gluon.jit
def attend_tile(
    b_q, b_acc, b_sum, b_max, smem, ready, free, k, i_n, end, factor, MMA: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """`triton_tile.attend_tile` of a tile whose keys and values come in two stages."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    stage = k % STAGES
    mbarrier.wait(ready.index(stage), (k // STAGES) & 1)
    b_k = smem.index(stage).permute((1, 0)).load(B)
    b_s = mma_v2(b_q, b_k, gl.zeros([ROWS, KEYS], gl.float32, MMA))
    release(free.index(stage))
    if MASKED:
        o_n = i_n + gl.arange(0, KEYS, layout=gl.SliceLayout(0, MMA))
        b_s = gl.where((o_n < end)[None, :], b_s, float("-inf"))
    b_new_max = gl.maximum(b_max, gl.max(b_s, 1) * factor)
    b_scale = gl.exp2(b_max - b_new_max)
    b_p = gl.exp2(b_s * factor - b_new_max[:, None])
    b_sum = b_sum * b_scale + gl.sum(b_p, 1)
    b_weights = gl.convert_layout(b_p.to(b_q.dtype), A)
    stage = (k + 1) % STAGES
    mbarrier.wait(ready.index(stage), ((k + 1) // STAGES) & 1)
    b_v = smem.index(stage).load(B)
    if MASKED:  # what lies behind the end may be NaN, which a weight of 0 does not hide
        o_k = i_n + gl.arange(0, KEYS, layout=gl.SliceLayout(1, B))
        b_v = gl.where((o_k < end)[:, None], b_v, 0.0).to(b_q.dtype)
    b_acc = mma_v2(b_weights, b_v, b_acc * b_scale[:, None])
    release(free.index(stage))
    return b_acc, b_sum, b_new_max


@gluon.jit
def merge(
    first, num_splits, stride_next, p_partial, p_log_sum, p_row, stride_out_head, G: gl.constexpr, BG: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
):  # fmt: skip
    """See `triton_merge.merge_splits`; of four splits all loads are on their way at a time."""
    PART: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    LOGS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    PART_ROW: gl.constexpr = gl.SliceLayout(1, PART)
    o_g = gl.arange(0, BG, layout=gl.SliceLayout(1, LOGS))
    o_all = gl.arange(0, MAX_SPLITS, layout=gl.SliceLayout(0, LOGS))
    m_all = (o_g < G)[:, None] & (o_all < num_splits)[None, :]
    p_logs = p_log_sum + (first + o_g)[:, None] + o_all[None, :] * stride_next
    b_logs = gl.load(p_logs, mask=m_all, other=NO_MAX, cache_modifier=".cg")
    b_max = gl.max(b_logs, 1)
    b_total = gl.convert_layout(gl.sum(gl.exp2(b_logs - b_max[:, None]), 1), PART_ROW)
    b_max = gl.convert_layout(b_max, PART_ROW)
    o_row = gl.arange(0, BG, layout=PART_ROW)
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, PART))
    m_row = o_row < G
    b_out = gl.zeros([BG, D], gl.float32, PART)
    for i_s in range(0, num_splits, 4):
        logs = gl.tuple(())
        parts = gl.tuple(())
        for i in gl.static_range(4):
            m = m_row & (i_s + i < num_splits)
            place = first + o_row + (i_s + i) * stride_next
            logs = logs + gl.tuple((gl.load(p_log_sum + place, mask=m, other=NO_MAX, cache_modifier=".cg"),))
            p_part = p_partial + place[:, None] * D + o_d[None, :]
            parts = parts + gl.tuple((gl.load(p_part, mask=m[:, None], other=0.0, cache_modifier=".cg"),))
        for i in gl.static_range(4):
            b_out += parts[i] * gl.exp2(logs[i] - b_max)[:, None]
    p_out = p_row + (o_row * stride_out_head)[:, None] + o_d[None, :]
    gl.store(p_out, (b_out / b_total[:, None]).to(p_row.dtype.element_ty), mask=m_row[:, None])


@gluon.jit
def attend_partition(
    smem, said, ready, free, p_q, p_out, p_partial, p_log_sum, p_arrived, factor, stride_q_token, stride_q_head,
    stride_out_token, stride_out_head, G: gl.constexpr, BG: gl.constexpr, HKV: gl.constexpr, STAGES: gl.constexpr,
    MAX_SPLITS: gl.constexpr, SPLIT_KEYS: gl.constexpr,
):  # fmt: skip
    """Four warps: attend to what has come."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_m = gl.arange(0, ROWS, layout=ROW)
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, MMA))
    o_qm = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    o_qd = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))
    k = 0
    turn, low, b_len = take(said, ready, k, STAGES)
    while turn >= 0:
        head = turn % HKV
        i_r, i_split, begin, end, num_splits = bounds_of(low, b_len, MAX_SPLITS, SPLIT_KEYS)
        p_query = p_q + i_r.to(gl.int64) * stride_q_token + head * G * stride_q_head
        b_q = gl.load(p_query + (o_qm * stride_q_head)[:, None] + o_qd[None, :], mask=(o_qm < G)[:, None], other=0.0)
        b_q = gl.convert_layout(b_q, gl.DotOperandLayout(0, MMA, 2))
        b_acc = gl.zeros([ROWS, D], gl.float32, MMA)
        b_sum = gl.zeros([ROWS], gl.float32, ROW)
        b_max = gl.full([ROWS], NO_MAX, gl.float32, ROW)
        whole = begin + (end - begin) // KEYS * KEYS
        for i_n in range(begin, whole, KEYS):
            b_acc, b_sum, b_max = attend_tile(
                b_q, b_acc, b_sum, b_max, smem, ready, free, k, i_n, end, factor, MMA, STAGES, False
            )
            k += 2
        if whole < end:
            b_acc, b_sum, b_max = attend_tile(
                b_q, b_acc, b_sum, b_max, smem, ready, free, k, whole, end, factor, MMA, STAGES, True
            )
            k += 2
        b_out = b_acc / b_sum[:, None]
        p_row = p_out + i_r.to(gl.int64) * stride_out_token + head * G * stride_out_head
        if num_splits == 1:
            p_o = p_row + (o_m * stride_out_head)[:, None] + o_d[None, :]
            gl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=(o_m < G)[:, None])
        else:
            first = ((turn // HKV - i_split).to(gl.int64) * HKV + head) * G
            o_part = first + i_split * (HKV * G) + o_m
            gl.store(p_partial + o_part[:, None] * D + o_d[None, :], b_out, mask=(o_m < G)[:, None])
            gl.store(p_log_sum + o_part, b_max + gl.log2(b_sum), mask=o_m < G)
            p_own = p_arrived + i_r * HKV + head
            thread_barrier()  # all have written before one of them counts
            before = gl.atomic_add(p_own, 1, sem="acq_rel", scope="gpu")
            thread_barrier()
            if before == num_splits - 1:
                merge(first, num_splits, HKV * G, p_partial, p_log_sum, p_row, stride_out_head, G, BG, MAX_SPLITS)
                gl.store(p_own, 0)  # for the next layer
        turn, low, b_len = take(said, ready, k, STAGES)


@quick_launch
@gluon.jit(do_not_specialize=["stride_table"])
def decode_gluon_kernel(
    desc, p_q, p_out, p_partial, p_log_sum, p_arrived, p_items, p_count, p_turn, p_tables, factor,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_table,
    G: gl.constexpr, BG: gl.constexpr, HKV: gl.constexpr, S: gl.constexpr, STAGES: gl.constexpr,
    MAX_SPLITS: gl.constexpr, SPLIT_KEYS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (programs,). `desc` sees the cache as rows [B * 2 * HKV * S, D]; p_turn [1] is 0 before and after; factor
    turns scores to base 2."""
    PIECES: gl.constexpr = KEYS // desc.block_shape[0]
    smem = gl.allocate_shared_memory(desc.dtype, [STAGES, KEYS, D], desc.layout)
    said = gl.allocate_shared_memory(gl.int32, [STAGES, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=PIECES)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.warp_specialize(
        [
            (attend_partition, (
                smem, said, ready, free, p_q, p_out, p_partial, p_log_sum, p_arrived, factor, stride_q_token,
                stride_q_head, stride_out_token, stride_out_head, G, BG, HKV, STAGES, MAX_SPLITS, SPLIT_KEYS,
            )),
            (copy_partition, (
                desc, smem, said, ready, free, p_items, p_count, p_turn, p_tables, stride_table, HKV, S, STAGES,
                MAX_SPLITS, SPLIT_KEYS,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def serves(call: DecodeCall) -> bool:
    """True of a captured step's list of whole contexts with enough to share out, plainly attended to, in 16 bits."""
    query, kv_cache, options, bias = call.query, call.kv_cache, call.options, call.options.bias
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    group = query.shape[1] // num_kv_heads
    return (
        call.listed is not None
        and not call.is_shared
        and call.each == 1
        and call.tile.keys == KEYS.value
        and options.sliding_window is None
        and options.soft_cap is None
        and (bias is None or (bias.sinks is None and bias.slopes is None and bias.by_distance is None))
        and query.dtype in (torch.bfloat16, torch.float16)
        and kv_cache.dtype == query.dtype
        and kv_cache.is_contiguous()
        and head_dim == D.value
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and group <= ROWS.value
        and call.meta.num_decodes * num_kv_heads >= LEAST_HEADS
    )


def run(call: DecodeCall) -> None:
    """`triton_decode.decode`, where `serves` agrees."""
    query, kv_cache, out, scratch, listed = call.query, call.kv_cache, call.out, call.scratch, call.listed
    assert listed is not None
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    group = query.shape[1] // num_kv_heads
    rows = kv_cache.view(-1, head_dim)
    box = [min(block_size, KEYS.value), PANEL.value]
    descriptor = TensorDescriptor(rows, list(rows.shape), list(rows.stride()), box, PANEL_LAYOUT)
    decode_gluon_kernel[(PER_MULTIPROCESSOR * multiprocessors(query.device),)](
        descriptor, query, out, scratch.partial, scratch.log_sum, scratch.arrived, listed.items, listed.count,
        scratch.turn, call.meta.block_table, call.options.scale * LOG2_E, query.stride(0), query.stride(1),
        out.stride(0), out.stride(1), call.meta.block_table.stride(0),
        G=group, BG=max(4, next_power_of_2(group)), HKV=num_kv_heads, S=block_size, STAGES=STAGES,
        MAX_SPLITS=triton_splits.MAX_SPLITS, SPLIT_KEYS=triton_splits.SPLIT_KEYS, num_warps=4, maxnreg=REGISTERS,
        **early_launch(query.device),
    )  # fmt: skip


KERNEL = Kernel(serves, run)
