# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""All layers of a decode step of several rows, each with one token, in one launch on Hopper GPUs, in Gluon.

It is `gluon_step` for plain weights: products are with all rows at once (`gluon_rows`), and a program attends for one
of the rows (`gluon_rows_attend`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from app.kernels.quick_launch import quick_launch
from app.kernels.whole_step.gluon_attend import LOG2E, attend_split, numbers_of_warps
from app.kernels.whole_step.gluon_copies import WIDE
from app.kernels.whole_step.gluon_rows import (
    GROUP,
    HALF,
    PART,
    D,
    copy_halves,
    loaded_norm,
    normed_rows,
    products_of_rows,
    products_with,
    taken_rows,
)
from app.kernels.whole_step.gluon_rows_attend import (
    attended_rows,
    copy_part,
    merge_parts,
    part_size,
    parts_of_rows,
    places_of,
    row_of,
)
from app.kernels.whole_step.gluon_step import heads_of, signal, wait_partition

COUNTERS = gl.constexpr(64)  # of the launch; behind them one of each row and head of keys and values


@gluon.jit
def copy_partition(
    d_hidden, d_read, d_act, d_lines, p_lines, p_table, p_len, w_smem, ready, free, i_p, NL, stride_table,
    ROWS: gl.constexpr, H: gl.constexpr, QH: gl.constexpr, KH: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr,
    AT_ONCE: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """One warp: all that this program reads of weights and of the cache, in order, as far ahead as there is room."""
    CL: gl.constexpr = d_lines.block_shape[0]
    BOXES: gl.constexpr = 2 * GROUP * HALF // CL
    halves = w_smem._reinterpret(gl.bfloat16, [STAGES * 2, GROUP, HALF, WIDE], d_hidden.layout)
    pieces = w_smem._reinterpret(gl.bfloat16, [STAGES * BOXES, CL, WIDE], d_lines.layout)
    CHUNK: gl.constexpr = 2 * PART  # numbers of a row of a weight in a stage
    OWN: gl.constexpr = H // PROGRAMS
    FP: gl.constexpr = F // PROGRAMS
    i_slot = i_p % SLOTS
    size, _ = part_size(p_len, ROWS, SLOTS, S, 1)
    counts = parts_of_rows(p_len, size, ROWS)
    row = row_of(counts, i_slot)
    own_row = gl.minimum(row, ROWS - 1)
    first_part, _ = places_of(counts, row)
    begin = (i_slot - first_part) * size
    end = gl.where(row < ROWS, gl.minimum(begin + size, gl.load(p_len + own_row) - 1), 0)
    p_own_table = p_table + own_row * stride_table
    first, groups = heads_of(i_p, (QH + 2 * KH) * D // GROUP, PROGRAMS)
    i = 0
    for layer in range(NL):
        p_own = p_lines + layer * 5
        qkv, output, gate, down = gl.load(p_own), gl.load(p_own + 1), gl.load(p_own + 2), gl.load(p_own + 3)
        cache = gl.load(p_own + 4)
        i = copy_halves(
            d_hidden, halves, ready, free, i, qkv, first * GROUP, H // WIDE, 0, H // CHUNK, groups, 0, STAGES
        )
        i = copy_part(
            d_lines, pieces, ready, free, i, cache, p_own_table, begin, end, i_p // SLOTS, KH, BOXES, CL, STAGES,
            S,
        )  # fmt: skip
        i = copy_halves(
            d_read, halves, ready, free, i, output, i_p * OWN, QH * D // WIDE, 0, QH * D // CHUNK, OWN // GROUP, 0,
            STAGES,
        )  # fmt: skip
        i = copy_halves(
            d_hidden, halves, ready, free, i, gate, i_p * FP, H // WIDE, 0, H // CHUNK, 2 * FP // GROUP, F, STAGES,
        )  # fmt: skip
        for c in range(0, F // CHUNK, AT_ONCE // CHUNK):
            i = copy_halves(
                d_act, halves, ready, free, i, down, i_p * OWN, F // WIDE, c, c + AT_ONCE // CHUNK, OWN // GROUP, 0,
                STAGES,
            )  # fmt: skip


@gluon.jit
def multiply_partition(
    w_smem, x_smem, out_smem, share_smem, merge_smem, ready, free, go, p_base, p_near, p_hidden, p_between, p_qkv,
    p_parts, p_sums, p_act, p_counters, p_slot, p_len, p_cos, p_sin, i_p, NL, eps, scale, stride_block,
    ROWS: gl.constexpr, H: gl.constexpr, QH: gl.constexpr, KH: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr,
    AT_ONCE: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, S: gl.constexpr,
    QK_NORM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """WARPS warps: all that is computed."""
    T: gl.constexpr = ROWS if ROWS < WARPS else WARPS
    XB: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [T, WARPS // T], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ROWS, ROWS], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(0, OUT)
    OF_PART: gl.constexpr = PART // D  # heads
    SL: gl.constexpr = gl.BlockedLayout([SLOTS // ROWS, 1], [1, 32], [1, WARPS], [0, 1])  # a thread has a head's parts
    CHUNK: gl.constexpr = 2 * PART  # numbers of a row of a weight in a stage
    QKV: gl.constexpr = (QH + 2 * KH) * D
    OWN: gl.constexpr = H // PROGRAMS
    FP: gl.constexpr = F // PROGRAMS
    MOST: gl.constexpr = out_smem.shape[0] * GROUP // 2
    halves = w_smem._reinterpret(gl.bfloat16, [STAGES * 2, GROUP * HALF, WIDE], w_smem.layout)
    flat = out_smem._reinterpret(gl.float32, [2 * MOST, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    firsts, seconds = flat.slice(0, MOST), flat.slice(MOST, MOST)
    o_out = gl.arange(0, MOST, layout=gl.SliceLayout(1, OUT))[:, None]
    o_t = gl.arange(0, ROWS, layout=ROW)[None, :]
    o_own = o_t * H + i_p * OWN + gl.arange(0, OWN, layout=gl.SliceLayout(1, OUT))[:, None]
    i_kv, i_slot = i_p // SLOTS, i_p % SLOTS
    size, is_even = part_size(p_len, ROWS, SLOTS, S, WARPS)
    counts = parts_of_rows(p_len, size, ROWS)
    row = row_of(counts, i_slot)
    first_part, count = places_of(counts, row)
    pos = gl.maximum(gl.load(p_len + gl.minimum(row, ROWS - 1)) - 1, 0)
    o_before, o_count = places_of(counts, gl.arange(0, ROWS, layout=gl.SliceLayout(1, XB)))
    o_parts = (o_before * (QH * D))[:, None] + gl.arange(0, PART, layout=gl.SliceLayout(0, XB))[None, :]
    m_parts = o_count[:, None] + o_parts * 0
    o_head = gl.arange(0, ROWS * QH, layout=gl.SliceLayout(0, SL))  # part of the vectors, row, head
    o_before, m_sums = places_of(counts, o_head // OF_PART % ROWS)
    o_sums = (o_before * QH + o_head // (ROWS * OF_PART) * OF_PART + o_head % OF_PART)[None, :]
    m_sums = m_sums[None, :]
    p_merged = p_parts + SLOTS * (QH * D)
    b_res = gl.load(p_hidden + o_own).to(gl.float32)
    first, groups = heads_of(i_p, QKV // GROUP, PROGRAMS)
    i = 0  # stages
    n = 0  # parts that all programs have written
    for layer in range(NL):
        # queries, keys, values; norms' weights, which nobody writes, are on their way before the wait
        p_own = p_near + layer * 6
        at_norm, at_query, at_key = gl.load(p_own), gl.load(p_own + 1), gl.load(p_own + 2)
        at_second, at_cache = gl.load(p_own + 3), gl.load(p_own + 4)
        norms = loaded_norm(p_base + at_norm * 8, H // PART, XB)
        if layer > 0:
            mbarrier.wait(go, n & 1)
            n += 1
        rms = normed_rows(p_hidden, norms, x_smem, eps, H, ROWS, XB)
        i = products_of_rows(x_smem, halves, ready, free, out_smem, i, groups, H // CHUNK, ROWS, STAGES, WARPS)
        b_out = firsts.load(OUT) * gl.convert_layout(rms, ROW)[None, :]
        gl.store(
            p_qkv + o_t * QKV + first * GROUP + o_out, b_out.to(gl.bfloat16), mask=o_out + o_t * 0 < groups * GROUP
        )
        signal(p_counters)
        if row < ROWS:
            p_own_parts, p_own_sums = p_parts + first_part * (QH * D), p_sums + first_part * QH
            i = attend_split(
                w_smem, x_smem, merge_smem, ready, free, p_qkv + row * QKV, p_base + at_cache * 8, p_slot + row,
                p_base + at_query * 8, p_base + at_key * 8, p_cos + row * D, p_sin + row * D, p_own_parts, p_own_sums,
                go, n, i, pos, i_kv, i_slot - first_part, size, count, eps, scale, stride_block, QH, KH, D, QH, SLOTS,
                GROUP, 2 * HALF, STAGES, S, QK_NORM, WARPS,
            )  # fmt: skip
            if not is_even:
                merge_parts(
                    p_own_parts, p_own_sums, p_merged + row * (QH * D), p_counters + COUNTERS + row * KH + i_kv, i_kv,
                    count, QH // KH, QH, SLOTS, WARPS,
                )  # fmt: skip
        else:
            mbarrier.wait(go, n & 1)
        n += 1
        signal(p_counters)
        # the output, and what it adds to the residual stream
        norms = loaded_norm(p_base + at_second * 8, H // PART, XB)
        mbarrier.wait(go, n & 1)
        n += 1
        if is_even:
            attended_rows(
                p_parts, p_sums, o_parts, m_parts, o_sums, m_sums, x_smem, share_smem, QH, SLOTS, ROWS, WARPS, XB, SL
            )  # fmt: skip
        else:
            taken_rows(p_merged, x_smem, QH * D, ROWS, XB)
        i = products_of_rows(
            x_smem, halves, ready, free, out_smem, i, OWN // GROUP, QH * D // CHUNK, ROWS, STAGES, WARPS
        )  # fmt: skip
        b_res = (flat.slice(0, OWN).load(OUT).to(gl.bfloat16).to(gl.float32) + b_res).to(gl.bfloat16).to(gl.float32)
        gl.store(p_between + o_own, b_res.to(gl.bfloat16))
        signal(p_counters)
        # gate and up
        mbarrier.wait(go, n & 1)
        n += 1
        rms = normed_rows(p_between, norms, x_smem, eps, H, ROWS, XB)
        i = products_of_rows(
            x_smem, halves, ready, free, out_smem, i, 2 * FP // GROUP, H // CHUNK, ROWS, STAGES, WARPS, True
        )  # fmt: skip
        b_rms = gl.convert_layout(rms, ROW)[None, :]
        b_gate = (firsts.load(OUT) * b_rms).to(gl.bfloat16).to(gl.float32)
        b_up = (seconds.load(OUT) * b_rms).to(gl.bfloat16).to(gl.float32)
        b_act = b_gate / (1.0 + gl.exp2(-b_gate * LOG2E)) * b_up
        gl.store(p_act + o_t * F + i_p * FP + o_out, b_act.to(gl.bfloat16), mask=o_out + o_t * 0 < FP)
        signal(p_counters)
        # down
        mbarrier.wait(go, n & 1)
        n += 1
        i = products_with(
            p_act, x_smem, halves, ready, free, out_smem, i, F, OWN // GROUP, AT_ONCE, ROWS, STAGES, WARPS, XB
        )  # fmt: skip
        b_res = (flat.slice(0, OWN).load(OUT).to(gl.bfloat16).to(gl.float32) + b_res).to(gl.bfloat16).to(gl.float32)
        gl.store(p_hidden + o_own, b_res.to(gl.bfloat16))
        signal(p_counters)
    # Who comes last leaves the counters zero for the next launch.
    arrived = gl.atomic_add(p_counters + 32, 1, sem="acq_rel", scope="gpu")
    if arrived == PROGRAMS - 1:
        gl.store(p_counters, 0)
        gl.store(p_counters + 32, 0)


@quick_launch
@gluon.jit(do_not_specialize=["NL"])
def rows_step_kernel(
    d_hidden, d_read, d_act, d_lines, p_base, p_lines, p_near, p_hidden, p_between, p_qkv, p_parts, p_sums, p_act,
    p_counters, p_table, p_slot, p_len, p_cos, p_sin, NL, eps, scale, stride_block, stride_table, ROWS: gl.constexpr,
    H: gl.constexpr, QH: gl.constexpr, KH: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr, AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr, S: gl.constexpr, QK_NORM: gl.constexpr, WARPS: gl.constexpr,
    MOST_GROUPS: gl.constexpr,
):  # fmt: skip
    """Grid (PROGRAMS,), KH * SLOTS of them, all of which must run at once. p_hidden [ROWS, H]: the residual stream
    before and behind NL layers. Pointers and places are as of `whole_step_kernel`. p_cos, p_sin [ROWS, D], p_slot and
    p_len [ROWS], p_table [ROWS, ..]. d_hidden, d_read and d_act: memory as rows of H, QH * D and F numbers lie in it.
    p_parts [SLOTS + ROWS, QH, D]: what parts of contexts gave, then rows; p_sums [2, SLOTS, QH]. AT_ONCE: so many of
    down's F numbers have room at once. A stage has 16 lines, a part of each weight's rows, of GROUP rows."""
    READ: gl.constexpr = AT_ONCE if AT_ONCE > QH * D else QH * D
    WIDEST: gl.constexpr = READ if READ > H else H
    OF_WARPS: gl.constexpr = numbers_of_warps(QH // KH, D, 64, WARPS)  # 64: tokens of a stage
    MOST: gl.constexpr = WIDEST if WIDEST * ROWS > 2 * OF_WARPS else 2 * OF_WARPS // ROWS
    WAITS: gl.constexpr = 5  # of a layer, in which all programs wait for each other
    i_p = gl.program_id(0)
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * GROUP * HALF, WIDE], d_lines.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [MOST // PART, HALF * ROWS, WIDE], d_lines.layout)
    out_smem = gl.allocate_shared_memory(
        gl.float32, [2 * MOST_GROUPS, GROUP, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )  # fmt: skip
    SPLITS: gl.constexpr = SLOTS // ROWS
    share_smem = gl.allocate_shared_memory(gl.float32, [SPLITS, ROWS * QH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    merge_smem = gl.allocate_shared_memory(gl.float32, [3, OF_WARPS // D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    mbarrier.init(go, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_partition, (
                w_smem, x_smem, out_smem, share_smem, merge_smem, ready, free, go, p_base, p_near, p_hidden, p_between,
                p_qkv, p_parts, p_sums, p_act, p_counters, p_slot, p_len, p_cos, p_sin, i_p, NL, eps, scale,
                stride_block, ROWS, H, QH, KH, F, PROGRAMS, AT_ONCE, STAGES, SLOTS, S, QK_NORM, WARPS,
            )),
            (copy_partition, (
                d_hidden, d_read, d_act, d_lines, p_lines, p_table, p_len, w_smem, ready, free, i_p, NL, stride_table,
                ROWS, H, QH, KH, F, PROGRAMS, AT_ONCE, STAGES, SLOTS, S,
            )),
            (wait_partition, (p_counters, go, NL * WAITS - 1, PROGRAMS)),
        ],
        [1, 1],
        [72, 24],
    )  # fmt: skip
