# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""All layers of a decode step of one token in one launch on Hopper GPUs, in Gluon.

Each program has some rows of every weight, for as long as the launch lives, and with them some numbers of the residual
stream, which stay in registers. One warp copies the rows by the GPU's copy engine (TMA) into a ring of stages, as far
ahead as there is room: over the ends of products, parts and layers, for nothing in a step writes weights. The other
warps multiply, write what came out, and count in memory that they have; one more warp waits until all programs have,
and lets its own go on. So the memory's bandwidth is used while programs wait for each other. Sums have a fixed order.
Triton's interpreter cannot run Gluon; tests run what it means on a CPU (`tests/kernels/gluon_on_cpu.py`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from app.kernels.quick_launch import quick_launch
from app.kernels.whole_step.gluon_attend import LOG2E, attend, attended, numbers_of_warps
from app.kernels.whole_step.gluon_copies import WIDE, copy_context, copy_rows, thread_barrier
from app.kernels.whole_step.gluon_experts import copy_experts, scales_of_chosen, scored, weights_of
from app.kernels.whole_step.gluon_forms import BLOCK, all_stored, group_of, keep_scales, scales_ahead, store_chunk
from app.kernels.whole_step.gluon_nibbles import arrivals


@gluon.jit
def read_now(p_word):
    """A number that others write, seen with all that they wrote before it."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [p_word.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_partition(p_counter, go, NUM, PROGRAMS: gl.constexpr):
    """One warp: waits until all programs have written a part, and lets the others of this one go on."""
    for i in range(NUM):
        while read_now(p_counter) < (i + 1) * PROGRAMS:
            pass
        mbarrier.arrive(go, count=1)


@gluon.jit
def signal(p_counter):
    """This program has written its part."""
    thread_barrier()
    gl.atomic_add(p_counter, 1, sem="release", scope="gpu")


@gluon.jit
def rows_of(
    x_smem, w_smem, scale_smem, ready, free, out_smem, i, GROUPS, CHUNKS: gl.constexpr,
    GROUP: gl.constexpr, CL: gl.constexpr, OWN_LINES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    FORM: gl.constexpr, PAIRS: gl.constexpr = False,
):  # fmt: skip
    """Writes products of GROUPS groups of rows with x into out_smem; of PAIRS the second ones into its second half."""
    STEP: gl.constexpr = out_smem.shape[0] // 2
    for g in range(GROUPS):
        b_sum, i = group_of(
            x_smem, w_smem, scale_smem, ready, free, i, g, CHUNKS, GROUP, CL, OWN_LINES, STAGES, WARPS, FORM
        )  # fmt: skip
        if PAIRS:
            out_smem.index(g % 2 * STEP + g // 2).store(b_sum)
        else:
            out_smem.index(g).store(b_sum)
    thread_barrier()
    return i


@gluon.jit
def loaded(p_x, STEP: gl.constexpr, CHUNKS: gl.constexpr, CL: gl.constexpr, PARTS: gl.constexpr, XB: gl.constexpr):
    """A vector, in chunks, each STEP numbers behind the one before."""
    ROWS: gl.constexpr = CL * PARTS * WIDE // BLOCK
    o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, XB))
    o_k = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, XB))
    o = o_r[:, None] * BLOCK + o_k[None, :]
    chunks = gl.tuple(())
    for c in gl.static_range(CHUNKS):  # all are on their way before one is used; others than this program write some
        chunks = chunks + gl.tuple((gl.load(p_x + c * STEP + o, cache_modifier=".cg"),))
    return chunks


@gluon.jit
def normed(
    p_hidden, norms, x_smem, scale_smem, eps, CHUNKS: gl.constexpr, CL: gl.constexpr, PARTS: gl.constexpr,
    XB: gl.constexpr, H: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Writes hidden * norm into x_smem; what its products are multiplied by then."""
    b_squares = gl.zeros([CL * PARTS * WIDE // BLOCK, BLOCK], gl.float32, XB)
    rows = loaded(p_hidden, CL * WIDE * PARTS, CHUNKS, CL, PARTS, XB)
    for c in gl.static_range(CHUNKS):
        b_h = rows[c].to(gl.float32)
        store_chunk(x_smem, scale_smem, c, (b_h * norms[c].to(gl.float32)).to(x_smem.dtype), CL, PARTS, FORM)
        b_squares += b_h * b_h
    rms = gl.rsqrt(gl.sum(gl.sum(b_squares, 1), 0) / H + eps)
    all_stored(FORM)
    return rms


@gluon.jit
def taken(
    p_x, x_smem, scale_smem, STEP: gl.constexpr, CHUNKS: gl.constexpr, CL: gl.constexpr, PARTS: gl.constexpr,
    XB: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Copies x into x_smem."""
    rows = loaded(p_x, STEP, CHUNKS, CL, PARTS, XB)
    for c in gl.static_range(CHUNKS):
        store_chunk(x_smem, scale_smem, c, rows[c], CL, PARTS, FORM)
    all_stored(FORM)


@gluon.jit
def heads_of(i_p, GROUPS: gl.constexpr, PROGRAMS: gl.constexpr):
    """A program's first group of rows of query, key and value, and how many it has: as even as can be."""
    first = i_p * GROUPS // PROGRAMS
    return first, (i_p + 1) * GROUPS // PROGRAMS - first


@gluon.jit
def copy_partition(
    d_lines, p_base, p_lines, p_near, p_table, p_len, w_smem, scale_smem, ready, free, chosen, p_scores, p_choice, i_p,
    NL, H: gl.constexpr, QH: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, F: gl.constexpr, GROUP: gl.constexpr,
    CL: gl.constexpr, PARTS: gl.constexpr, SIDES: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
    SPLITS: gl.constexpr, FEW: gl.constexpr, LONG: gl.constexpr, S: gl.constexpr, FORM: gl.constexpr,
    E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr, OF_CHOSEN: gl.constexpr, ROUNDS_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """One warp: all that this program reads of weights and of the cache, in order, as far ahead as there is room."""
    pieces = w_smem._reinterpret(gl.bfloat16, [STAGES * GROUP, CL, WIDE], d_lines.layout)
    QKV: gl.constexpr = (QH + 2 * KH) * D
    OWN: gl.constexpr = H // PROGRAMS
    FP: gl.constexpr = F // PROGRAMS
    LINE: gl.constexpr = WIDE * PARTS  # numbers of a weight
    AHEAD: gl.constexpr = 4 if E > 0 else STAGES  # stages on their way; of layers without experts not measured
    i = 0
    pos = gl.maximum(gl.load(p_len) - 1, 0)
    first, groups = heads_of(i_p, QKV // GROUP, PROGRAMS)
    for layer in range(NL):
        p_own, p_sides = p_lines + layer * 5, p_near + layer * (6 + 4 * SIDES) + 6
        qkv, output, gate, down = gl.load(p_own), gl.load(p_own + 1), gl.load(p_own + 2), gl.load(p_own + 3)
        cache = gl.load(p_own + 4)
        i = copy_rows(
            d_lines, pieces, ready, free, i, qkv, first * GROUP, H // LINE, GROUP, CL, groups, 0, STAGES, AHEAD,
            FORM, QKV, p_base, p_sides, scale_smem,
        )  # fmt: skip
        i = copy_context(
            d_lines, pieces, ready, free, i, cache, p_table, pos, i_p // SPLITS, i_p % SPLITS, KH, D, SPLITS,
            FEW, LONG, GROUP, CL, STAGES, AHEAD, S, FORM,
        )  # fmt: skip
        i = copy_rows(
            d_lines, pieces, ready, free, i, output, i_p * OWN, QH * D // LINE, GROUP, CL, OWN // GROUP, 0, STAGES,
            AHEAD, FORM, H, p_base, p_sides + SIDES, scale_smem,
        )  # fmt: skip
        if E > 0:
            i = copy_experts(
                d_lines, pieces, ready, free, i, chosen, gate, down, p_scores + layer % 2 * E,
                p_choice, i_p, H, F, GROUP, CL, PARTS, PROGRAMS, STAGES, AHEAD, FORM, E, BE, TOP,
                OF_CHOSEN, ROUNDS_WEIGHTS,
            )  # fmt: skip
        else:
            i = copy_rows(
                d_lines, pieces, ready, free, i, gate, i_p * FP, H // LINE, GROUP, CL, 2 * FP // GROUP, F, STAGES,
                AHEAD, FORM, 2 * F, p_base, p_sides + 2 * SIDES, scale_smem,
            )  # fmt: skip
            i = copy_rows(
                d_lines, pieces, ready, free, i, down, i_p * OWN, F // LINE, GROUP, CL, OWN // GROUP, 0, STAGES, AHEAD,
                FORM, H, p_base, p_sides + 3 * SIDES, scale_smem,
            )  # fmt: skip


@gluon.jit
def places_of(p_own, SIDES: gl.constexpr):
    """The places of a layer's norms of queries and keys, of its second norm and its cache, and of what stands beside
    its output, its gate and up, and its down."""
    at_query, at_key, at_second, at_cache = (
        gl.load(p_own + 1), gl.load(p_own + 2), gl.load(p_own + 3), gl.load(p_own + 4)
    )  # fmt: skip
    at_output, at_gate, at_down = at_cache, at_cache, at_cache
    if SIDES > 0:
        at_output = gl.load(p_own + 6 + SIDES)
        at_gate, at_down = gl.load(p_own + 6 + 2 * SIDES), gl.load(p_own + 6 + 3 * SIDES)
    return at_query, at_key, at_second, at_cache, at_output, at_gate, at_down


@gluon.jit
def multiply_partition(
    w_smem, x_smem, out_smem, share_smem, merge_smem, scale_smem, ready, free, go, chosen, p_base, p_near, p_hidden,
    p_between, p_qkv, p_parts, p_sums, p_act, p_scores, p_choice, p_counters, p_slot, p_len, p_cos, p_sin, i_p, NL, eps,
    scale, stride_block, H: gl.constexpr, QH: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, F: gl.constexpr,
    GROUP: gl.constexpr, CL: gl.constexpr, PARTS: gl.constexpr, SIDES: gl.constexpr, KEPT_ROWS: gl.constexpr,
    KEPT: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, FEW: gl.constexpr,
    LONG: gl.constexpr, S: gl.constexpr, QK_NORM: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr,
    E: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """WARPS warps: all that is computed."""
    V: gl.constexpr = 8 if PARTS * CL >= 4 * WARPS else 4
    XB: gl.constexpr = gl.BlockedLayout([1, V], [V // 4, 128 // V], [WARPS, 1], [1, 0])
    R1: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    K: gl.constexpr = CL * WIDE * PARTS
    NEAR: gl.constexpr = 6 + 4 * SIDES
    QKV: gl.constexpr = (QH + 2 * KH) * D
    MOST: gl.constexpr = (QKV // GROUP + PROGRAMS - 1) // PROGRAMS  # groups of it
    OWN: gl.constexpr = H // PROGRAMS
    FP: gl.constexpr = TOP * F // PROGRAMS
    STEP: gl.constexpr = K if F > K else F  # what a stage of down has, of one expert
    HALF: gl.constexpr = out_smem.shape[0] * GROUP // 2
    flat = out_smem._reinterpret(gl.float32, [2 * HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    firsts, seconds = flat.slice(0, HALF), flat.slice(HALF, HALF)
    o_row = gl.arange(0, HALF, layout=R1)
    o_own = i_p * OWN + gl.arange(0, OWN, layout=R1)
    pos = gl.maximum(gl.load(p_len) - 1, 0)
    b_res = gl.load(p_hidden + o_own).to(gl.float32)
    first, groups = heads_of(i_p, QKV // GROUP, PROGRAMS)
    at_norm = gl.load(p_near)
    at_qkv = at_norm
    if SIDES > 0:
        at_qkv = gl.load(p_near + 6)
    scales = scales_ahead(
        p_base, at_qkv, first * GROUP, 0, MOST, H // K, QKV, KEPT_ROWS, KEPT, GROUP, CL,
        WARPS, FORM,
    )  # fmt: skip
    i = 0  # stages
    n = 0  # parts that all programs have written
    for layer in range(NL):
        # queries, keys, values; norms' weights, which nobody writes, are on their way before the wait
        norms = loaded(p_base + at_norm * 8, K, H // K, CL, PARTS, XB)
        p_own = p_near + layer * NEAR
        at_query, at_key, at_second, at_cache, at_output, at_gate, at_down = places_of(p_own, SIDES)
        keep_scales(scales, scale_smem, FORM)
        if layer > 0:
            mbarrier.wait(go, n & 1)
            n += 1
        rms = normed(p_hidden, norms, x_smem, scale_smem, eps, H // K, CL, PARTS, XB, H, FORM)
        scales = scales_ahead(
            p_base, at_output, i_p * OWN, 0, OWN // GROUP, QH * D // K, H, KEPT_ROWS, KEPT, GROUP, CL, WARPS, FORM
        )  # fmt: skip
        i = rows_of(
            x_smem, w_smem, scale_smem, ready, free, out_smem, i, groups, H // K, GROUP, CL, CL, STAGES, WARPS,
            FORM,
        )  # fmt: skip
        gl.store(p_qkv + first * GROUP + o_row, (firsts.load(R1) * rms).to(gl.bfloat16), mask=o_row < groups * GROUP)
        signal(p_counters)
        keep_scales(scales, scale_smem, FORM)
        p_query_norm, p_key_norm, p_cache = p_base + at_query * 8, p_base + at_key * 8, p_base + at_cache * 8
        i = attend(
            w_smem, x_smem, merge_smem, ready, free, p_qkv, p_cache, p_slot, p_query_norm, p_key_norm, p_cos, p_sin,
            p_parts, p_sums, p_counters + WIDE, go, n, i, pos, i_p // SPLITS, i_p % SPLITS, eps, scale, stride_block,
            QH, KH, D, QH, SPLITS, FEW, LONG, GROUP, CL, STAGES, S, QK_NORM, WARPS,
        )  # fmt: skip
        n += 1
        signal(p_counters)
        # the output, and what it adds to the residual stream
        norms = loaded(p_base + at_second * 8, K, H // K, CL, PARTS, XB)
        mbarrier.wait(go, n & 1)
        n += 1
        attended(
            p_parts, p_sums, x_smem, scale_smem, share_smem, pos, QH * D // K, GROUP, CL, PARTS, QH, D, QH, SPLITS,
            FEW, LONG, S, WARPS, FORM,
        )  # fmt: skip
        if E == 0:
            scales = scales_ahead(
                p_base, at_gate, i_p * FP, F, 2 * FP // GROUP, H // K, 2 * F, KEPT_ROWS, KEPT, GROUP, CL, WARPS, FORM
            )  # fmt: skip
        i = rows_of(
            x_smem, w_smem, scale_smem, ready, free, out_smem, i, OWN // GROUP, QH * D // K, GROUP, CL, CL, STAGES,
            WARPS, FORM,
        )  # fmt: skip
        b_own = flat.slice(0, OWN).load(R1)
        b_res = (b_own.to(gl.bfloat16).to(gl.float32) + b_res).to(gl.bfloat16).to(gl.float32)
        gl.store(p_between + o_own, b_res.to(gl.bfloat16))
        signal(p_counters)
        # gate and up
        keep_scales(scales, scale_smem, FORM)
        p_next = p_near + gl.minimum(layer + 1, NL - 1) * NEAR
        at_norm = gl.load(p_next)
        if SIDES > 0:
            at_qkv = gl.load(p_next + 6)
        if E > 0:
            p_router = p_base + gl.load(p_own + 5) * 8 + gl.minimum(i_p, E - 1) * H
            router = loaded(p_router, K, H // K, CL, PARTS, XB)
            mbarrier.wait(go, n & 1)
            hidden = loaded(p_between, K, H // K, CL, PARTS, XB)
            rms = scored(
                hidden, norms, router, x_smem, scale_smem, p_scores + layer % 2 * E, i_p, eps, H // K, CL, PARTS, XB, H,
                E, FORM,
            )  # fmt: skip
            mbarrier.wait(chosen, layer & 1)
            b_weight = weights_of(p_choice, i_p * FP + o_row, F, TOP)
            scales = scales_of_chosen(
                p_base, at_gate, at_down, p_choice + TOP, scale_smem, i_p, H, F, PROGRAMS, KEPT_ROWS, KEPT, GROUP, CL,
                WARPS, TOP, FORM,
            )  # fmt: skip
        else:
            mbarrier.wait(go, n & 1)
            rms = normed(p_between, norms, x_smem, scale_smem, eps, H // K, CL, PARTS, XB, H, FORM)
            scales = scales_ahead(
                p_base, at_down, i_p * OWN, 0, OWN // GROUP, F // K, H, KEPT_ROWS, KEPT, GROUP, CL, WARPS, FORM
            )  # fmt: skip
        n += 1
        i = rows_of(
            x_smem, w_smem, scale_smem, ready, free, out_smem, i, 2 * FP // GROUP, H // K, GROUP, CL, CL, STAGES, WARPS,
            FORM, True,
        )  # fmt: skip
        b_gate = (firsts.load(R1) * rms).to(gl.bfloat16).to(gl.float32)
        b_up = (seconds.load(R1) * rms).to(gl.bfloat16).to(gl.float32)
        b_act = b_gate / (1.0 + gl.exp2(-b_gate * LOG2E)) * b_up
        if E > 0:
            b_act *= b_weight
        gl.store(p_act + i_p * FP + o_row, b_act.to(gl.bfloat16), mask=o_row < FP)
        signal(p_counters)
        # down
        keep_scales(scales, scale_smem, FORM)
        mbarrier.wait(go, n & 1)
        n += 1
        if E > 0:  # all have read the scores; these are written again in two layers
            gl.store(p_scores + layer % 2 * E + i_p, float("nan"), mask=i_p < E)
        taken(p_act, x_smem, scale_smem, STEP, TOP * F // STEP, CL, PARTS, XB, FORM)
        scales = scales_ahead(
            p_base, at_qkv, first * GROUP, 0, MOST, H // K, QKV, KEPT_ROWS, KEPT, GROUP, CL, WARPS, FORM
        )  # fmt: skip
        i = rows_of(
            x_smem, w_smem, scale_smem, ready, free, out_smem, i, OWN // GROUP, TOP * F // STEP, GROUP, CL,
            STEP // (WIDE * PARTS), STAGES, WARPS, FORM,
        )  # fmt: skip
        b_own = flat.slice(0, OWN).load(R1)
        b_res = (b_own.to(gl.bfloat16).to(gl.float32) + b_res).to(gl.bfloat16).to(gl.float32)
        gl.store(p_hidden + o_own, b_res.to(gl.bfloat16))
        signal(p_counters)
    # Who comes last leaves the counters zero for the next launch.
    arrived = gl.atomic_add(p_counters + 32, 1, sem="acq_rel", scope="gpu")
    if arrived == PROGRAMS - 1:
        gl.store(p_counters, 0)
        gl.store(p_counters + 32, 0)
        for i_kv in range(KH):
            gl.store(p_counters + (1 + i_kv) * WIDE, 0)


@quick_launch
@gluon.jit(do_not_specialize=["NL"])
def whole_step_kernel(
    d_lines, p_base, p_lines, p_near, p_hidden, p_between, p_qkv, p_parts, p_sums, p_act, p_scores,
    p_choices, p_counters, p_table, p_slot, p_len, p_cos, p_sin, NL, eps, scale, stride_block,
    H: gl.constexpr, QH: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, F: gl.constexpr, GROUP: gl.constexpr,
    CL: gl.constexpr, PARTS: gl.constexpr, SIDES: gl.constexpr, KEPT_ROWS: gl.constexpr, KEPT: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, FEW: gl.constexpr, LONG: gl.constexpr,
    S: gl.constexpr, QK_NORM: gl.constexpr, WARPS: gl.constexpr, MOST_GROUPS: gl.constexpr, FORM: gl.constexpr,
    E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr, OF_CHOSEN: gl.constexpr, ROUNDS_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Grid (PROGRAMS,), all of which must run at once. p_hidden [H]: the residual stream before and behind NL layers.

    d_lines [.., WIDE] begins where p_base does. p_lines int32 [NL, 5]: which of its lines each layer's weights (query-
    key-value, output, gate and up, down) and its cache [B, 2, KH, S, D] begin at. p_near int64 [NL, 6 + 4 * SIDES]: how
    many times 16 bytes from p_base on its norms (first, of queries, of keys, second), its cache and its router lie,
    then what stands beside each weight. p_counters is zero before and after. A stage has CL lines, a part of each
    weight's rows, of GROUP rows. MOST_GROUPS: such groups of a weight (gate's) that a program has, at most; a power of
    2. FORM says what the weights' words are, PARTS how many numbers in each; KEPT_ROWS, KEPT: the size of what is kept
    of scales. E: experts, BE: the next power of 2; the best TOP are chosen (0 and 1: there are none). p_scores [2, E]
    is NaN before and after. SPLITS, FEW, LONG: see `splits_of`."""
    LINE: gl.constexpr = CL * WIDE * PARTS
    DOWN: gl.constexpr = TOP * (F if F > LINE else LINE)
    OF_WARPS: gl.constexpr = 2 * numbers_of_warps(QH // KH, D, GROUP * CL * WIDE // D, WARPS)
    READ: gl.constexpr = DOWN if DOWN > QH * D else QH * D
    MOST: gl.constexpr = READ if READ > OF_WARPS else OF_WARPS
    WAITS: gl.constexpr = 5  # of a layer, in which all programs wait for each other
    i_p = gl.program_id(0)
    p_choice = p_choices + i_p * (2 * TOP)  # weights of the chosen experts, and their numbers
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, GROUP * CL, WIDE], d_lines.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [MOST // (CL * WIDE), CL, WIDE], d_lines.layout)
    out_smem = gl.allocate_shared_memory(gl.float32, [2 * MOST_GROUPS, GROUP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    share_smem = gl.allocate_shared_memory(gl.float32, [FEW, QH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    merge_smem = gl.allocate_shared_memory(gl.float32, [3, OF_WARPS // D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scale_smem = gl.allocate_shared_memory(gl.float32, [KEPT_ROWS, KEPT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    chosen = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=arrivals(FORM))
        mbarrier.init(free.index(s), count=1)
    mbarrier.init(go, count=1)
    mbarrier.init(chosen, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_partition, (
                w_smem, x_smem, out_smem, share_smem, merge_smem, scale_smem, ready, free, go, chosen, p_base, p_near,
                p_hidden, p_between, p_qkv, p_parts, p_sums, p_act, p_scores, p_choice, p_counters, p_slot, p_len,
                p_cos, p_sin, i_p, NL, eps, scale, stride_block, H, QH, KH, D, F, GROUP, CL, PARTS, SIDES, KEPT_ROWS,
                KEPT, PROGRAMS, STAGES, SPLITS, FEW, LONG, S, QK_NORM, WARPS, FORM, E, TOP,
            )),
            (copy_partition, (
                d_lines, p_base, p_lines, p_near, p_table, p_len, w_smem, scale_smem, ready, free, chosen, p_scores,
                p_choice, i_p, NL, H, QH, KH, D, F, GROUP, CL, PARTS, SIDES, PROGRAMS, STAGES, SPLITS, FEW, LONG, S,
                FORM, E, BE, TOP, OF_CHOSEN, ROUNDS_WEIGHTS,
            )),
            (wait_partition, (p_counters, go, NL * WAITS - 1, PROGRAMS)),
        ],
        [1, 1],
        [104, 24],
    )  # fmt: skip
