# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`gluon_step` for layers of latent attention and of experts some of which every token goes to, in bf16."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from app.kernels.quick_launch import quick_launch
from app.kernels.whole_step.gluon_attend import LOG2E
from app.kernels.whole_step.gluon_boxes import bring, bring_rows
from app.kernels.whole_step.gluon_copies import WIDE, thread_barrier
from app.kernels.whole_step.gluon_experts import scored
from app.kernels.whole_step.gluon_latent import (
    BOX,
    KEYS,
    absorb,
    attend_latents,
    copy_latents,
    key_columns,
    of_new,
    values_of,
)
from app.kernels.whole_step.gluon_pairs import pairs_of_rows, rows_in_pairs
from app.kernels.whole_step.gluon_shared import activated_places, all_down, copy_all_experts, own_pairs
from app.kernels.whole_step.gluon_step import heads_of, loaded, normed, signal, taken, wait_partition


@gluon.jit
def copy_partition(
    d_lines, d_tokens, p_lines, p_table, p_len, w_smem, ready, free, chosen, p_scores, p_choice, i_p, NL, boxes,
    token_lines, H: gl.constexpr, QH: gl.constexpr, N: gl.constexpr, V: gl.constexpr, R: gl.constexpr, DR: gl.constexpr,
    F: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, SPLITS: gl.constexpr, S: gl.constexpr, E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr,
    BT: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """One warp: all that this program reads of weights and of the cache, in order, as far ahead as there is room."""
    pieces = w_smem._reinterpret(gl.bfloat16, [STAGES * GROUP, CL, WIDE], d_lines.layout)
    tokens = w_smem._reinterpret(gl.bfloat16, [STAGES * (2 * KEYS // BOX), BOX, WIDE], d_lines.layout)
    IN: gl.constexpr = QH * (N + DR) + R + DR
    OWN: gl.constexpr = H // PROGRAMS
    SPANS: gl.constexpr = PROGRAMS // QH
    i = 0
    pos = gl.maximum(gl.load(p_len) - 1, 0)
    first, groups = heads_of(i_p, IN // GROUP, PROGRAMS)
    for layer in range(NL):
        p_own = p_lines + layer * 6
        given, up, output = gl.load(p_own), gl.load(p_own + 1), gl.load(p_own + 2)
        gate, down, cache = gl.load(p_own + 3), gl.load(p_own + 4), gl.load(p_own + 5)
        i = bring_rows(
            d_lines, pieces, ready, free, i, given, first * GROUP, groups, boxes, H // WIDE, GROUP, CL, STAGES, AHEAD
        )  # fmt: skip
        i = copy_latents(
            d_tokens, tokens, ready, free, i, cache, p_table, pos, i_p, token_lines, SPLITS, STAGES, AHEAD, S
        )  # fmt: skip
        value = up + (i_p // SPANS * (N + V) + N + i_p % SPANS * (V // SPANS)) * (R // WIDE)
        i = bring(d_lines, pieces, ready, free, i, value, CL, boxes, GROUP, CL, STAGES, AHEAD)  # in one piece
        i = bring_rows(
            d_lines, pieces, ready, free, i, output, i_p * OWN, OWN // GROUP, boxes, QH * V // WIDE, GROUP, CL, STAGES,
            AHEAD,
        )  # fmt: skip
        i = copy_all_experts(
            d_lines, pieces, ready, free, i, chosen, gate, down, p_scores + layer % 2 * E, p_choice, i_p, boxes, H, F,
            GROUP, CL, PROGRAMS, STAGES, AHEAD, E, BE, TOP, BT, SHARED,
        )  # fmt: skip


@gluon.jit
def multiply_partition(
    w_smem, x_smem, out_smem, ready, free, go, chosen, p_base, p_near, p_hidden, p_between, p_in, p_query, p_new,
    p_parts, p_sums, p_heads, p_act, p_scores, p_choice, p_counters, p_slot, p_len, p_cos, p_sin, i_p, NL, boxes, eps,
    latent_eps, scale, stride_block,
    H: gl.constexpr, QH: gl.constexpr, N: gl.constexpr, V: gl.constexpr, R: gl.constexpr, DR: gl.constexpr,
    F: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
    SPLITS: gl.constexpr, S: gl.constexpr, WARPS: gl.constexpr, E: gl.constexpr, TOP: gl.constexpr,
    SHARED: gl.constexpr, BL: gl.constexpr,
):  # fmt: skip
    """WARPS warps: all that is computed."""
    U: gl.constexpr = 8 if CL >= 4 * WARPS else 4
    XB: gl.constexpr = gl.BlockedLayout([1, U], [U // 4, 128 // U], [WARPS, 1], [1, 0])
    R1: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    K: gl.constexpr = CL * WIDE
    SPANS: gl.constexpr = PROGRAMS // QH
    OWN: gl.constexpr = H // PROGRAMS
    PAIRS: gl.constexpr = (TOP + SHARED) * F // (PROGRAMS * GROUP)
    STEP: gl.constexpr = out_smem.shape[0] // 2
    HALF: gl.constexpr = STEP * GROUP
    flat = out_smem._reinterpret(gl.float32, [2 * HALF], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    firsts, seconds = flat.slice(0, HALF), flat.slice(HALF, HALF)
    o_row = gl.arange(0, HALF, layout=R1)
    o_own = i_p * OWN + gl.arange(0, OWN, layout=R1)
    pos, slot = gl.maximum(gl.load(p_len) - 1, 0), gl.load(p_slot)
    b_res = gl.load(p_hidden + o_own).to(gl.float32)
    first, groups = heads_of(i_p, (QH * (N + DR) + R + DR) // GROUP, PROGRAMS)
    _, of_shared, _ = own_pairs(i_p, F, GROUP, PROGRAMS, SHARED, PAIRS)
    o_act = activated_places(o_row, i_p, F, GROUP, PROGRAMS, SHARED, PAIRS)
    i = 0  # stages
    n = 0  # parts that all programs have written
    for layer in range(NL):
        # queries and latents; what nobody writes is on its way before the wait
        p_own = p_near + layer * 6
        norms = loaded(p_base + gl.load(p_own) * 8, K, H // K, CL, 1, XB)
        at_second, at_latent, at_cache = gl.load(p_own + 1), gl.load(p_own + 2), gl.load(p_own + 3)
        at_router, at_up = gl.load(p_own + 4), gl.load(p_own + 5)
        if layer > 0:
            mbarrier.wait(go, n & 1)
            n += 1
        rms = normed(p_hidden, norms, x_smem, x_smem, eps, H // K, CL, 1, XB, H, "bf16")
        i = rows_in_pairs(x_smem, w_smem, ready, free, out_smem, i, groups, H // K, GROUP, CL, STAGES, WARPS)
        gl.store(p_in + first * GROUP + o_row, (firsts.load(R1) * rms).to(gl.bfloat16), mask=o_row < groups * GROUP)
        signal(p_counters)
        columns = key_columns(p_base + at_up * 8, i_p, N, V, R, SPANS, WARPS)
        norm, cos, sin = of_new(p_base + at_latent * 8, p_cos, p_sin, R, DR, WARPS)
        mbarrier.wait(go, n & 1)
        n += 1
        absorb(
            columns, norm, cos, sin, p_in, p_query, p_new, p_base + at_cache * 8, slot, i_p, latent_eps, stride_block,
            QH, N, R, DR, SPANS, S, WARPS,
        )  # fmt: skip
        signal(p_counters)
        mbarrier.wait(go, n & 1)
        n += 1
        i = attend_latents(
            w_smem, x_smem, ready, free, p_query, p_new, p_parts, p_sums, i, i_p, pos, scale * LOG2E, QH, R, DR, SPLITS,
            STAGES, WARPS,
        )  # fmt: skip
        signal(p_counters)
        mbarrier.wait(go, n & 1)
        n += 1
        i = values_of(
            w_smem, x_smem, ready, free, p_parts, p_sums, p_heads, i, i_p, pos, QH, V, R, SPANS, SPLITS, STAGES, CL,
            WARPS,
        )  # fmt: skip
        signal(p_counters)
        # the output, and what it adds to the residual stream
        norms = loaded(p_base + at_second * 8, K, H // K, CL, 1, XB)
        mbarrier.wait(go, n & 1)
        n += 1
        taken(p_heads, x_smem, x_smem, K, QH * V // K, CL, 1, XB, "bf16")
        i = rows_in_pairs(
            x_smem, w_smem, ready, free, out_smem, i, OWN // GROUP, QH * V // K, GROUP, CL, STAGES, WARPS
        )  # fmt: skip
        b_own = flat.slice(0, OWN).load(R1)
        b_res = (b_own.to(gl.bfloat16).to(gl.float32) + b_res).to(gl.bfloat16).to(gl.float32)
        gl.store(p_between + o_own, b_res.to(gl.bfloat16))
        signal(p_counters)
        # gate and up
        router = loaded(p_base + at_router * 8 + gl.minimum(i_p, E - 1) * H, K, H // K, CL, 1, XB)
        mbarrier.wait(go, n & 1)
        n += 1
        hidden = loaded(p_between, K, H // K, CL, 1, XB)
        rms = scored(
            hidden, norms, router, x_smem, x_smem, p_scores + layer % 2 * E, i_p, eps, H // K, CL, 1, XB, H, E, "bf16"
        )  # fmt: skip
        i = pairs_of_rows(
            x_smem, w_smem, ready, free, out_smem, i, 0, of_shared, STEP, H // K, GROUP, CL, STAGES, WARPS
        )  # fmt: skip
        mbarrier.wait(chosen, layer & 1)
        b_weight = gl.load(p_choice + gl.minimum(o_act // F, TOP + SHARED - 1), cache_modifier=".cg")
        i = pairs_of_rows(
            x_smem, w_smem, ready, free, out_smem, i, of_shared, PAIRS, STEP, H // K, GROUP, CL, STAGES, WARPS
        )  # fmt: skip
        thread_barrier()
        b_gate = (firsts.load(R1) * rms).to(gl.bfloat16).to(gl.float32)
        b_up = (seconds.load(R1) * rms).to(gl.bfloat16).to(gl.float32)
        b_act = b_gate / (1.0 + gl.exp2(-b_gate * LOG2E)) * b_up * b_weight
        gl.store(p_act + o_act, b_act.to(gl.bfloat16), mask=o_row < PAIRS * GROUP)
        signal(p_counters)
        # down
        mbarrier.wait(go, n & 1)
        n += 1
        # All have read the scores; these are written again in two layers.
        gl.store(p_scores + layer % 2 * E + i_p, float("nan"), mask=i_p < E)
        i = all_down(
            x_smem, w_smem, ready, free, flat.slice(0, BL), p_act, i, boxes, F, OWN, TOP + SHARED, BL, GROUP, CL,
            STAGES, WARPS,
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


@quick_launch
@gluon.jit(do_not_specialize=["NL", "boxes", "token_lines"])
def latent_step_kernel(
    d_lines, d_tokens, p_base, p_lines, p_near, p_hidden, p_between, p_in, p_query, p_new, p_parts, p_sums, p_heads,
    p_act, p_scores, p_choices, p_counters, p_table, p_slot, p_len, p_cos, p_sin, NL, boxes, token_lines, eps,
    latent_eps, scale, stride_block,
    H: gl.constexpr, QH: gl.constexpr, N: gl.constexpr, V: gl.constexpr, R: gl.constexpr, DR: gl.constexpr,
    F: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, SPLITS: gl.constexpr, S: gl.constexpr, WARPS: gl.constexpr, MOST_GROUPS: gl.constexpr,
    E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr, BT: gl.constexpr, SHARED: gl.constexpr, BL: gl.constexpr,
    X_CHUNKS: gl.constexpr,
):  # fmt: skip
    """Grid (PROGRAMS,), all of which must run at once. p_hidden [H]: the residual stream before and behind NL layers.

    d_lines [.., WIDE] and d_tokens [.., R + DR] begin where p_base does. p_lines int32 [NL, 6]: at which lines each
    layer's weights (of queries and latents, of keys and values, output, gate and up, down) and its cache
    [B, S, R + DR] begin. p_near int64 [NL, 6]: how many times 16 bytes from p_base on its norms (first, second, of
    latents), its cache, its router and its functions of keys and values lie. p_counters is zero before and after,
    p_scores [2, E] NaN. `boxes` is GROUP, and token_lines are a token's in the cache: loops over them stay loops.
    Of E experts the best TOP are chosen, and SHARED more behind them always. BE, BT and BL are powers of 2 that E,
    TOP + SHARED and the lines of a row of down fit in; MOST_GROUPS one that groups of rows do, of gate and of queries
    and latents. X_CHUNKS, each of CL lines, hold whatever a product reads."""
    WAITS: gl.constexpr = 7  # of a layer, in which all programs wait for each other
    i_p = gl.program_id(0)
    p_choice = p_choices + i_p * (TOP + SHARED)
    w_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, GROUP * CL, WIDE], d_lines.layout)
    x_smem = gl.allocate_shared_memory(gl.bfloat16, [X_CHUNKS, CL, WIDE], d_lines.layout)
    out_smem = gl.allocate_shared_memory(gl.float32, [2 * MOST_GROUPS, GROUP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    chosen = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    mbarrier.init(go, count=1)
    mbarrier.init(chosen, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_partition, (
                w_smem, x_smem, out_smem, ready, free, go, chosen, p_base, p_near, p_hidden, p_between, p_in, p_query,
                p_new, p_parts, p_sums, p_heads, p_act, p_scores, p_choice, p_counters, p_slot, p_len, p_cos, p_sin,
                i_p, NL, boxes, eps, latent_eps, scale, stride_block, H, QH, N, V, R, DR, F, GROUP, CL, PROGRAMS,
                STAGES, SPLITS, S, WARPS, E, TOP, SHARED, BL,
            )),
            (copy_partition, (
                d_lines, d_tokens, p_lines, p_table, p_len, w_smem, ready, free, chosen, p_scores, p_choice, i_p, NL,
                boxes, token_lines, H, QH, N, V, R, DR, F, GROUP, CL, PROGRAMS, STAGES, AHEAD, SPLITS, S, E, BE,
                TOP, BT, SHARED,
            )),
            (wait_partition, (p_counters, go, NL * WAITS - 1, PROGRAMS)),
        ],
        [1, 1],
        [72, 24],
    )  # fmt: skip
