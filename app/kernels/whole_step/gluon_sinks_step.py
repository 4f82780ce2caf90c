# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""All layers of a decode step of one token in one launch, as `gluon_step`, for layers as GPT-OSS has them, in Gluon:
heads of 64 that share keys, with sinks and windows, products with biases, and experts in MXFP4 with a clamped gate.

Rows of a weight need not part evenly, neither among programs nor into stages. A row's last stage ends with the row; the
vector is 0 where that repeats what the stage before had.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from app.kernels.quick_launch import quick_launch
from app.kernels.whole_step.gluon_attend import LOG2E
from app.kernels.whole_step.gluon_copies import WIDE, room, thread_barrier
from app.kernels.whole_step.gluon_forms import plain_group
from app.kernels.whole_step.gluon_mxfp4 import (
    ARRIVALS,
    BLOCK,
    BLOCKS,
    CHUNK,
    ROWS,
    copy_chosen,
    down,
    gate_and_up,
    store_blocks,
)
from app.kernels.whole_step.gluon_sinks import D, attend, attended, copy_keys
from app.kernels.whole_step.gluon_step import heads_of, signal, wait_partition

CL = gl.constexpr(16)  # lines of a row, in a stage
NEAR = gl.constexpr(14)  # places of a layer


@gluon.jit
def copy_lines(
    d_lines, pieces, ready, free, i, base, first, groups, LINES: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Groups of rows of a weight in bf16, from `first` on."""
    for g in range(groups):
        for c in range((LINES + CL - 1) // CL):
            stage = room(ready, free, i, STAGES, AHEAD)
            mbarrier.expect(ready.index(stage), ROWS * CL * WIDE * 2)
            for r in gl.static_range(ROWS):
                line = base + ((first + g) * ROWS + r) * LINES + gl.minimum(c * CL, LINES - CL)
                tma.async_copy_global_to_shared(d_lines, [line, 0], ready.index(stage), pieces.index(stage * ROWS + r))
            mbarrier.arrive(ready.index(stage), count=ARRIVALS - 1)
            i += 1
    return i


@gluon.jit
def chunks_of(p_x, K: gl.constexpr, ENDS: gl.constexpr, XB: gl.constexpr):
    """A vector in chunks [BLOCKS, BLOCK]. ENDS: the last one ends with it, and what another has is 0 there."""
    o_r = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, XB))[:, None]
    o = o_r * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, XB))[None, :]
    chunks = gl.tuple(())
    for c in gl.static_range((K + CHUNK - 1) // CHUNK):  # all are on their way before one is used
        if ENDS and (c + 1) * CHUNK > K:
            chunks = chunks + gl.tuple(
                (gl.load(p_x + (K - CHUNK) + o, mask=o >= (c + 1) * CHUNK - K, other=0.0, cache_modifier=".cg"),)
            )
        else:
            chunks = chunks + gl.tuple(
                (gl.load(p_x + c * CHUNK + o, mask=o < K - c * CHUNK, other=0.0, cache_modifier=".cg"),)
            )
    return chunks


@gluon.jit
def normed_lines(hidden, norms, x_smem, eps, H: gl.constexpr, XB: gl.constexpr):
    """Writes hidden * norm into x_smem, line by line; what its products are multiplied by then."""
    b_squares = gl.zeros([BLOCKS, BLOCK], gl.float32, XB)
    for c in gl.static_range((H + CHUNK - 1) // CHUNK):
        b_h = hidden[c].to(gl.float32)
        x_smem.index(c).store(gl.reshape((b_h * norms[c].to(gl.float32)).to(gl.bfloat16), [CL, WIDE]))
        b_squares += b_h * b_h
    rms = gl.rsqrt(gl.sum(gl.sum(b_squares, 1), 0) / H + eps)
    fence_async_shared()  # the tensor cores read it
    thread_barrier()
    return rms


@gluon.jit
def normed_blocks(hidden, norms, router, bias, x_smem, p_score, m_score, eps, H: gl.constexpr, XB: gl.constexpr):
    """The same block by block, and the score of this program's expert, whose row is `router`."""
    b_squares = gl.zeros([BLOCKS, BLOCK], gl.float32, XB)
    b_products = gl.zeros([BLOCKS, BLOCK], gl.float32, XB)
    for c in gl.static_range((H + CHUNK - 1) // CHUNK):
        b_h = hidden[c].to(gl.float32)
        b_x = (b_h * norms[c].to(gl.float32)).to(gl.bfloat16)
        store_blocks(x_smem, c, b_x)
        b_squares += b_h * b_h
        b_products += b_x.to(gl.float32) * router[c].to(gl.float32)
    rms = gl.rsqrt(gl.sum(gl.sum(b_squares, 1), 0) / H + eps)
    score = gl.sum(gl.sum(b_products, 1), 0) * rms + bias.to(gl.float32)
    gl.store(p_score, gl.where(score == score, score, -float("inf")), mask=m_score)  # NaN says: not there yet
    thread_barrier()
    return rms


@gluon.jit
def rows_of(
    x_smem, w_smem, out_smem, ready, free, i, groups, LINES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr
):
    """Writes products of groups of rows in bf16 with x into out_smem."""
    for g in range(groups):
        b_sum, i = plain_group(
            x_smem, w_smem, ready, free, i, (LINES + CL - 1) // CL, ROWS, CL, CL, STAGES, WARPS
        )  # fmt: skip
        out_smem.index(g).store(b_sum)
    thread_barrier()
    return i


@gluon.jit
def copy_partition(
    d_lines, p_base, p_lines, p_seen, p_near, p_table, p_table_windowed, p_len, w_smem, scale_smem, ready, free, chosen,
    p_scores, p_choice, i_p, NL, H: gl.constexpr, QH: gl.constexpr, KH: gl.constexpr, F: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, SPLITS: gl.constexpr, S: gl.constexpr,
    E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr, OF_CHOSEN: gl.constexpr, ROUNDS_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """One warp: all that this program reads of weights and of the cache, in order, as far ahead as there is room."""
    pieces = w_smem._reinterpret(gl.bfloat16, [STAGES * ROWS, CL, WIDE], d_lines.layout)
    i = 0
    pos = gl.maximum(gl.load(p_len) - 1, 0)
    first, groups = heads_of(i_p, (QH + 2 * KH) * D // ROWS, PROGRAMS)
    first_own, owned = heads_of(i_p, H // ROWS, PROGRAMS)
    first_act, acts = heads_of(i_p, TOP * F // ROWS, PROGRAMS)
    for layer in range(NL):
        p_own = p_lines + layer * 3
        qkv, output, cache = gl.load(p_own), gl.load(p_own + 1), gl.load(p_own + 2)
        window, group = gl.load(p_seen + layer * 2), gl.load(p_seen + layer * 2 + 1)
        p_blocks = p_table
        if group > 0:
            p_blocks = p_table_windowed
        i = copy_lines(d_lines, pieces, ready, free, i, qkv, first, groups, H // WIDE, STAGES, AHEAD)
        i = copy_keys(
            d_lines, pieces, ready, free, i, cache, p_blocks, pos, window, i_p, KH, SPLITS, STAGES, AHEAD, S, ARRIVALS
        )
        i = copy_lines(d_lines, pieces, ready, free, i, output, first_own, owned, QH * D // WIDE, STAGES, AHEAD)
        i = copy_chosen(
            w_smem, scale_smem, ready, free, i, chosen, p_base, p_near + layer * NEAR + 8, p_scores + layer % 2 * E,
            p_choice, first_act, acts, first_own, owned, H, F, STAGES, AHEAD, E, BE, TOP, OF_CHOSEN, ROUNDS_WEIGHTS,
        )  # fmt: skip


@gluon.jit
def multiply_partition(
    w_smem, x_smem, out_smem, share_smem, scale_smem, ready, free, go, chosen, p_base, p_seen, p_near, p_hidden,
    p_between, p_qkv, p_parts, p_sums, p_act, p_scores, p_choice, p_counters, p_slot, p_slot_windowed, p_len, p_cos,
    p_sin, i_p, NL, eps, scale, limit, alpha, up_offset, stride_block, H: gl.constexpr, QH: gl.constexpr,
    KH: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    S: gl.constexpr, WARPS: gl.constexpr, E: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """WARPS warps: all that is computed."""
    XB: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    R1: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    HALF: gl.constexpr = out_smem.shape[0] * ROWS // 2
    FP: gl.constexpr = (F + CHUNK - 1) // CHUNK * CHUNK  # numbers of an expert, among those of all
    flat = out_smem._reinterpret(gl.float32, [2 * HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    firsts, seconds = flat.slice(0, HALF), flat.slice(HALF, HALF)
    o_row = gl.arange(0, HALF, layout=R1)
    pos = gl.maximum(gl.load(p_len) - 1, 0)
    first, groups = heads_of(i_p, (QH + 2 * KH) * D // ROWS, PROGRAMS)
    first_own, owned = heads_of(i_p, H // ROWS, PROGRAMS)
    first_act, acts = heads_of(i_p, TOP * F // ROWS, PROGRAMS)
    m_qkv, m_own, m_act = o_row < groups * ROWS, o_row < owned * ROWS, o_row < acts * ROWS
    o_qkv, o_own = first * ROWS + o_row, first_own * ROWS + o_row
    o_act = gl.minimum(first_act * ROWS + o_row, TOP * F - 1)
    o_k, o_in = o_act // F, o_act % F
    b_res = gl.load(p_hidden + o_own, mask=m_own, other=0.0).to(gl.float32)
    i = 0  # stages
    n = 0  # parts that all programs have written
    for layer in range(NL):
        # queries, keys, values; what nobody writes is on its way before the wait
        p_own = p_near + layer * NEAR
        p_norm, p_second = p_base + gl.load(p_own) * 8, p_base + gl.load(p_own + 1) * 8
        p_cache, p_router = p_base + gl.load(p_own + 2) * 8, p_base + gl.load(p_own + 3) * 8
        p_qkv_bias, p_out_bias = p_base + gl.load(p_own + 4) * 8, p_base + gl.load(p_own + 5) * 8
        p_router_bias = p_base + gl.load(p_own + 6) * 8
        p_sinks = (p_base + gl.load(p_own + 7) * 8).to(gl.pointer_type(gl.float32), bitcast=True)
        p_gate_bias, p_down_bias = p_base + gl.load(p_own + 10) * 8, p_base + gl.load(p_own + 13) * 8
        window, group = gl.load(p_seen + layer * 2), gl.load(p_seen + layer * 2 + 1)
        p_new = p_slot
        if group > 0:
            p_new = p_slot_windowed
        norms = chunks_of(p_norm, H, True, XB)
        b_bias = gl.load(p_qkv_bias + o_qkv, mask=m_qkv, other=0.0).to(gl.float32)
        if layer > 0:
            mbarrier.wait(go, n & 1)
            n += 1
        rms = normed_lines(chunks_of(p_hidden, H, True, XB), norms, x_smem, eps, H, XB)
        i = rows_of(x_smem, w_smem, out_smem, ready, free, i, groups, H // WIDE, STAGES, WARPS)
        gl.store(p_qkv + o_qkv, (firsts.load(R1) * rms + b_bias).to(gl.bfloat16), mask=m_qkv)
        signal(p_counters)
        i = attend(
            w_smem, ready, free, p_qkv, p_cache, p_new, p_sinks, p_cos, p_sin, p_parts, p_sums, go, n, i, i_p, pos,
            window, scale, stride_block, QH, KH, SPLITS, STAGES, S, WARPS,
        )  # fmt: skip
        n += 1
        signal(p_counters)
        # the output, and what it adds to the residual stream
        norms = chunks_of(p_second, H, False, XB)
        b_bias = gl.load(p_out_bias + o_own, mask=m_own, other=0.0).to(gl.float32)
        mbarrier.wait(go, n & 1)
        n += 1
        attended(p_parts, p_sums, x_smem, share_smem, pos, window, QH, SPLITS, WARPS)
        i = rows_of(x_smem, w_smem, out_smem, ready, free, i, owned, QH * D // WIDE, STAGES, WARPS)
        b_own = (firsts.load(R1) + b_bias).to(gl.bfloat16).to(gl.float32)
        b_res = (b_own + b_res).to(gl.bfloat16).to(gl.float32)
        gl.store(p_between + o_own, b_res.to(gl.bfloat16), mask=m_own)
        signal(p_counters)
        # gate and up of the chosen experts
        scores = p_scores + layer % 2 * E
        i_e = gl.minimum(i_p, E - 1)
        router = chunks_of(p_router + i_e * H, H, False, XB)
        bias = gl.load(p_router_bias + i_e)
        mbarrier.wait(go, n & 1)
        n += 1
        hidden = chunks_of(p_between, H, False, XB)
        rms = normed_blocks(hidden, norms, router, bias, x_smem, scores + i_p, i_p < E, eps, H, XB)
        mbarrier.wait(chosen, layer & 1)
        b_weight = gl.load(p_choice + o_k, cache_modifier=".cg")
        b_expert = gl.load(p_choice + TOP + o_k, cache_modifier=".cg").to(gl.int32)
        b_gate_bias = gl.load(p_gate_bias + b_expert * (2 * F) + o_in).to(gl.float32)
        b_up_bias = gl.load(p_gate_bias + b_expert * (2 * F) + F + o_in).to(gl.float32)
        b_bias = gl.zeros([HALF], gl.float32, R1)
        for k in gl.static_range(TOP):
            weight, expert = (
                gl.load(p_choice + k, cache_modifier=".cg"),
                gl.load(p_choice + TOP + k, cache_modifier=".cg"),
            )
            b_one = gl.load(p_down_bias + expert.to(gl.int32) * H + o_own, mask=m_own, other=0.0)
            b_bias += weight * b_one.to(gl.float32)
        i = gate_and_up(x_smem, w_smem, scale_smem, out_smem, ready, free, i, acts, H, STAGES, WARPS)
        b_gate = gl.minimum(firsts.load(R1) * rms + b_gate_bias, limit)
        b_up = gl.minimum(gl.maximum(seconds.load(R1) * rms + b_up_bias, -limit), limit)
        b_act = b_gate / (1.0 + gl.exp2(-alpha * LOG2E * b_gate)) * (b_up + up_offset) * b_weight
        gl.store(p_act + o_k * FP + o_in, b_act.to(gl.bfloat16), mask=m_act)
        signal(p_counters)
        # down
        mbarrier.wait(go, n & 1)
        n += 1
        gl.store(scores + i_p, float("nan"), mask=i_p < E)  # all have read them; two layers on they are written again
        acted = chunks_of(p_act, TOP * FP, False, XB)
        for c in gl.static_range(TOP * FP // CHUNK):
            store_blocks(x_smem, c, acted[c])
        thread_barrier()
        i = down(x_smem, w_smem, scale_smem, out_smem, ready, free, i, owned, F, STAGES, WARPS)
        b_own = (firsts.load(R1) + b_bias).to(gl.bfloat16).to(gl.float32)
        b_res = (b_own + b_res).to(gl.bfloat16).to(gl.float32)
        gl.store(p_hidden + o_own, b_res.to(gl.bfloat16), mask=m_own)
        signal(p_counters)
    # Who comes last leaves the counters zero for the next launch.
    arrived = gl.atomic_add(p_counters + 32, 1, sem="acq_rel", scope="gpu")
    if arrived == PROGRAMS - 1:
        gl.store(p_counters, 0)
        gl.store(p_counters + 32, 0)


@quick_launch
@gluon.jit(do_not_specialize=["NL"])
def sinks_step_kernel(
    d_lines, p_base, p_lines, p_seen, p_near, p_hidden, p_between, p_qkv, p_parts, p_sums, p_act, p_scores, p_choices,
    p_counters, p_table, p_table_windowed, p_slot, p_slot_windowed, p_len, p_cos, p_sin, NL, eps, scale, limit, alpha,
    up_offset, stride_block,
    H: gl.constexpr, QH: gl.constexpr, KH: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, SPLITS: gl.constexpr, S: gl.constexpr, WARPS: gl.constexpr, MOST_GROUPS: gl.constexpr,
    E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr, OF_CHOSEN: gl.constexpr, ROUNDS_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Grid (PROGRAMS,), all of which must run at once. p_hidden [H]: the residual stream before and behind NL layers.

    d_lines [.., WIDE] begins where p_base does. p_lines int32 [NL, 3]: which of its lines each layer's weights (query-
    key-value, output) and its cache [B, 2, KH, S, D] begin at. p_seen int32 [NL, 2]: its window (0: none), and whether
    its blocks are those of p_table_windowed. p_near int64 [NL, 14]: how many times 16 bytes from p_base on lie its
    norms, its cache, the router, the biases of query-key-value, output and router, the sinks (fp32), and of gate and
    up, then of down, the words, the scales and the bias. p_counters is zero before and after; p_scores [2, E] is NaN
    before and after."""
    WAITS: gl.constexpr = 5  # of a layer, in which all programs wait for each other
    FP: gl.constexpr = (F + CHUNK - 1) // CHUNK * CHUNK
    HP: gl.constexpr = (H + CHUNK - 1) // CHUNK * CHUNK
    READ: gl.constexpr = QH * D if QH * D > HP else HP
    MOST: gl.constexpr = TOP * FP if TOP * FP > READ else READ
    i_p = gl.program_id(0)
    p_choice = p_choices + i_p * (2 * TOP)  # weights of the chosen experts, and their numbers
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS * CL, WIDE], d_lines.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [MOST // CHUNK, CL, WIDE], d_lines.layout)
    out_smem = gl.allocate_shared_memory(gl.float32, [2 * MOST_GROUPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    share_smem = gl.allocate_shared_memory(gl.float32, [SPLITS, QH], FLAT)
    scale_smem = gl.allocate_shared_memory(gl.int32, [STAGES, 4 * BLOCKS, ROWS], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    chosen = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=ARRIVALS)
        mbarrier.init(free.index(s), count=1)
    mbarrier.init(go, count=1)
    mbarrier.init(chosen, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_partition, (
                w_smem, x_smem, out_smem, share_smem, scale_smem, ready, free, go, chosen, p_base, p_seen, p_near,
                p_hidden, p_between, p_qkv, p_parts, p_sums, p_act, p_scores, p_choice, p_counters, p_slot,
                p_slot_windowed, p_len, p_cos, p_sin, i_p, NL, eps, scale, limit, alpha, up_offset, stride_block, H, QH,
                KH, F, PROGRAMS, STAGES, SPLITS, S, WARPS, E, TOP,
            )),
            (copy_partition, (
                d_lines, p_base, p_lines, p_seen, p_near, p_table, p_table_windowed, p_len, w_smem, scale_smem, ready,
                free, chosen, p_scores, p_choice, i_p, NL, H, QH, KH, F, PROGRAMS, STAGES, AHEAD, SPLITS, S, E, BE, TOP,
                OF_CHOSEN, ROUNDS_WEIGHTS,
            )),
            (wait_partition, (p_counters, go, NL * WAITS - 1, PROGRAMS)),
        ],
        [1, 1],
        [104, 24],
    )  # fmt: skip
