# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Experts within a whole step, in Gluon: the choice, the chosen experts' rows, and their products.

A program scores one expert, by a row of the router that it holds in registers. Scores bring their own flag: memory
holds NaN until one is there, so nobody counts and waits. The warp that copies chooses, as it alone needs the choice at
once: each program has rows of gate and up of some chosen experts, and rows of down of all of them. What an expert gives
is weighed before its down, whose sums then go over all chosen experts as over one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from app.kernels.whole_step.gluon_attend import LOG2E
from app.kernels.whole_step.gluon_copies import WIDE, copy_rows, thread_barrier
from app.kernels.whole_step.gluon_forms import BLOCK, all_stored, keep_scales, store_chunk


@gluon.jit
def read_numbers(p):
    """Numbers that others write, as they are now."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=f,l", [p.to(gl.int64)], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def scored(
    hidden, norms, router, x_smem, scale_smem, p_scores, i_p, eps, CHUNKS: gl.constexpr, CL: gl.constexpr,
    PARTS: gl.constexpr, XB: gl.constexpr, H: gl.constexpr, E: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Writes hidden * norm into x_smem, and the score of this program's expert, whose row is `router`; what products
    with x_smem are multiplied by then."""
    b_squares = gl.zeros([PARTS * CL * WIDE // BLOCK, BLOCK], gl.float32, XB)
    b_products = gl.zeros([PARTS * CL * WIDE // BLOCK, BLOCK], gl.float32, XB)
    for c in gl.static_range(CHUNKS):
        b_h = hidden[c].to(gl.float32)
        b_x = (b_h * norms[c].to(gl.float32)).to(x_smem.dtype)
        store_chunk(x_smem, scale_smem, c, b_x, CL, PARTS, FORM)
        b_squares += b_h * b_h
        b_products += b_x.to(gl.float32) * router[c].to(gl.float32)
    rms = gl.rsqrt(gl.sum(gl.sum(b_squares, 1), 0) / H + eps)
    score = gl.sum(gl.sum(b_products, 1), 0) * rms
    gl.store(p_scores + i_p, gl.where(score == score, score, -float("inf")), mask=i_p < E)  # NaN says: not there yet
    all_stored(FORM)
    return rms


@gluon.jit
def weights_of(p_choice, o_act, F: gl.constexpr, TOP: gl.constexpr):
    """Weights of the experts that these numbers, of F for each chosen one, belong to."""
    return gl.load(p_choice + gl.minimum(o_act // F, TOP - 1), cache_modifier=".cg")


@gluon.jit
def scales_of_chosen(
    p_base, at_gate, at_down, p_ids, scale_smem, i_p, H: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr,
    KEPT_ROWS: gl.constexpr, KEPT: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, WARPS: gl.constexpr,
    TOP: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Keeps those of the chosen experts' gate and up, and returns those of their down."""
    if FORM == "bf16":
        b_scales = 0
    else:
        b_gate = expert_scales(
            p_base, at_gate, p_ids, i_p, 2 * F, H, 2 * TOP * F // (PROGRAMS * GROUP), False, PROGRAMS, KEPT_ROWS, KEPT,
            GROUP, CL, WARPS, TOP,
        )  # fmt: skip
        keep_scales(b_gate, scale_smem, FORM)
        thread_barrier()
        b_scales = expert_scales(
            p_base, at_down, p_ids, i_p, H, F, H // (PROGRAMS * GROUP) * TOP, True, PROGRAMS, KEPT_ROWS, KEPT, GROUP,
            CL, WARPS, TOP,
        )  # fmt: skip
    return b_scales


@gluon.jit
def expert_scales(
    p_base, at, p_ids, i_p, N: gl.constexpr, K: gl.constexpr, GROUPS: gl.constexpr, OF_ALL: gl.constexpr,
    PROGRAMS: gl.constexpr, KEPT_ROWS: gl.constexpr, KEPT: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr,
    WARPS: gl.constexpr, TOP: gl.constexpr,
):  # fmt: skip
    """Scales of this program's GROUPS groups of rows of the chosen experts' weights [N, K], as `scales_ahead` gives
    them. OF_ALL: of down, whose rows are multiplied with all experts' numbers, one behind the other."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // KEPT, KEPT], [WARPS, 1], [1, 0])
    CHUNKS: gl.constexpr = (K + CL * BLOCK - 1) // (CL * BLOCK)
    o_r = gl.arange(0, KEPT_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    o_g = gl.minimum(o_r // CHUNKS, GROUPS - 1)
    if OF_ALL:
        o_k = o_g % TOP
        o_row = i_p * (N // PROGRAMS) + o_g // TOP * GROUP
    else:
        o_pair = i_p * (GROUPS // 2) + o_g // 2
        o_k = o_pair // (N // 2 // GROUP)
        o_row = o_pair % (N // 2 // GROUP) * GROUP + o_g % 2 * (N // 2)
    o_l = (o_r % CHUNKS * CL)[:, None] + gl.arange(0, KEPT, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    b_expert = gl.load(p_ids + o_k, cache_modifier=".cg").to(gl.int32)
    o = (b_expert * (K // BLOCK * (N // BLOCK)) + o_row // BLOCK)[:, None] + o_l * (N // BLOCK)
    p_scales = (p_base + at * 8).to(gl.pointer_type(gl.float32), bitcast=True)
    return gl.load(p_scales + o, mask=(o_r < GROUPS * CHUNKS)[:, None] & (o_l < K // BLOCK), other=0.0)


@gluon.jit
def choose(p_scores, p_choice, E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr, OF_CHOSEN: gl.constexpr,
           ROUNDS_WEIGHTS: gl.constexpr):  # fmt: skip
    """One warp: waits for all scores; the best TOP experts, the best first. Writes their weights, and
    behind these their numbers."""
    SCORES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])  # a warp asks for 128 bytes, a line, at once
    CHOICE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    o_e = gl.arange(0, BE, layout=SCORES)
    o_k = gl.arange(0, TOP, layout=CHOICE)
    p_own = p_scores + gl.minimum(o_e, E - 1)
    b_scores = read_numbers(p_own)
    while gl.max(gl.where(b_scores == b_scores, 0, 1), 0) > 0:
        b_scores = read_numbers(p_own)
    # Keys have 16 bits in the order of the numbers, and below them the experts' numbers, so that all are unlike.
    b_bits = (b_scores.to(gl.bfloat16).to(gl.float32) + 0.0).to(gl.int32, bitcast=True)
    b_keys = gl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits) & -65536
    b_keys = gl.where(o_e < E, b_keys | (65535 - o_e), -2147483648)
    best = gl.max(b_keys, 0)
    top = score_of(best)
    b_best = gl.zeros([TOP], gl.float32, CHOICE) + top
    ids = gl.tuple((65535 - (best & 65535),))
    b_ids = gl.zeros([TOP], gl.float32, CHOICE) + ids[0].to(gl.float32)
    for k in gl.static_range(1, TOP):
        b_keys = gl.where(b_keys == best, -2147483648, b_keys)
        best = gl.max(b_keys, 0)
        b_best = gl.where(o_k == k, score_of(best), b_best)
        ids = ids + gl.tuple((65535 - (best & 65535),))
        b_ids = gl.where(o_k == k, ids[k].to(gl.float32), b_ids)
    b_weights = gl.exp2((b_best - top) * LOG2E)
    if OF_CHOSEN:
        total = gl.sum(b_weights, 0)
    else:
        b_rounded = b_scores.to(gl.bfloat16).to(gl.float32)
        total = gl.sum(gl.where(o_e < E, gl.exp2((b_rounded - top) * LOG2E), 0.0), 0)
    b_weights = b_weights / total
    if ROUNDS_WEIGHTS:
        b_weights = b_weights.to(gl.bfloat16).to(gl.float32)
    gl.store(p_choice + o_k, b_weights)
    gl.store(p_choice + TOP + o_k, b_ids)
    return ids


@gluon.jit
def score_of(key):
    """The number that a key stands for."""
    bits = key & -65536
    return gl.where(bits < 0, bits ^ 0x7FFF0000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def copy_experts(
    d_lines, pieces, ready, free, i, chosen, gate, down, p_scores, p_choice, i_p, H: gl.constexpr, F: gl.constexpr,
    GROUP: gl.constexpr, CL: gl.constexpr, PARTS: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, FORM: gl.constexpr, E: gl.constexpr, BE: gl.constexpr, TOP: gl.constexpr,
    OF_CHOSEN: gl.constexpr, ROUNDS_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """The rows of a layer's chosen experts that this program has, as soon as they are known: of gate and up some of one
    or of several, of down some of all."""
    LINE: gl.constexpr = WIDE * PARTS
    PAIRS: gl.constexpr = TOP * F // (PROGRAMS * GROUP)
    OF_ONE: gl.constexpr = F // GROUP
    OWN: gl.constexpr = H // PROGRAMS
    ids = choose(p_scores, p_choice, E, BE, TOP, OF_CHOSEN, ROUNDS_WEIGHTS)
    thread_barrier()
    mbarrier.arrive(chosen, count=1)
    for g in range(i_p * PAIRS, (i_p + 1) * PAIRS):
        row = one_of(ids, g // OF_ONE, TOP) * (2 * F) + g % OF_ONE * GROUP
        i = copy_rows(d_lines, pieces, ready, free, i, gate, row, H // LINE, GROUP, CL, 2, F, STAGES, AHEAD, FORM)
    for g in range(OWN // GROUP * TOP):
        row = one_of(ids, g % TOP, TOP) * H + i_p * OWN + g // TOP * GROUP
        i = copy_rows(d_lines, pieces, ready, free, i, down, row, F // LINE, GROUP, CL, 1, 0, STAGES, AHEAD, FORM)
    return i


@gluon.jit
def one_of(ids, k, TOP: gl.constexpr):
    """The k-th of them."""
    found = ids[0]
    for j in gl.static_range(1, TOP):
        found = gl.where(k == j, ids[j], found)
    return found
