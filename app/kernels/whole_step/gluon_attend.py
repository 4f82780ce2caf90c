# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of one token within a whole step, in Gluon.

A program has a split of the context of one head of keys and values, for all query heads that read it. These are the 16
rows of products on the tensor cores; each warp has tokens of its own of a stage, and its own maxima and sums, so no
warp waits for another before the split ends. What splits give is put together by whoever reads it where splits are few.
Of many splits the program that comes last among those of a head puts theirs together, for all to read. Both go by the
splits' order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from app.kernels.whole_step.gluon_copies import WIDE, splits_of, thread_barrier
from app.kernels.whole_step.gluon_forms import all_stored, store_chunk
from app.kernels.whole_step.gluon_ring import release

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)  # of scores


@gluon.constexpr_function
def rows_of_group(of_group):
    """Rows of a product's result that are kept for the query heads of a group: the tensor cores give 8 at once."""
    return max(8, of_group)


@gluon.constexpr_function
def warps_apart(tokens, warps):
    """Warps that have tokens of their own of a stage's: the tensor cores take 16 at once."""
    return max(1, min(warps, tokens // 16))


@gluon.constexpr_function
def numbers_of_warps(of_group, head_dim, tokens, warps):
    """Numbers that warps lay side by side at the end of a split."""
    return max(8, of_group) * head_dim * max(1, min(warps, tokens // 16))


@gluon.jit
def turned(b_a, b_b, b_norm, b_other, b_cos, b_sin, eps, QK_NORM: gl.constexpr):
    """Heads of queries or keys, normed and rotated: [.., D]; b_b: their halves the other way round."""
    b_a, b_b = b_a.to(gl.float32), b_b.to(gl.float32)
    if QK_NORM:
        rms = gl.rsqrt(gl.sum(b_a * b_a, 1) / b_a.shape[1] + eps)[:, None]
        b_a = (b_a * rms * b_norm.to(gl.float32)).to(gl.bfloat16).to(gl.float32)
        b_b = (b_b * rms * b_other.to(gl.float32)).to(gl.bfloat16).to(gl.float32)
    return (b_a * b_cos + b_b * b_sin).to(gl.bfloat16)


@gluon.jit
def over_stages(
    w_smem, ready, free, i, b_q, b_top, b_total, b_acc, left, scale, TOKENS: gl.constexpr, APART: gl.constexpr,
    STAGES: gl.constexpr, MMA: gl.constexpr, IS_WHOLE: gl.constexpr,
):  # fmt: skip
    """Queries [APART, M, D] over a stage of keys and one of values, of which the first `left` tokens count: all, if
    IS_WHOLE. The rest are as `over_context` gives them."""
    EACH: gl.constexpr = TOKENS // APART
    M: gl.constexpr = b_q.shape[1]
    D: gl.constexpr = b_q.shape[2]
    COLUMN: gl.constexpr = gl.SliceLayout(1, MMA)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    OF_VALUE: gl.constexpr = gl.SliceLayout(2, RIGHT)
    stage = i % STAGES
    mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
    b_keys = w_smem.index(stage).reshape([APART, EACH, D]).permute((0, 2, 1)).load(RIGHT)
    b_s = mma_v2(b_q, b_keys, gl.zeros([APART, M, EACH], gl.float32, MMA)) * scale
    release(free.index(stage))
    i += 1
    if not IS_WHOLE:
        o_n = gl.arange(0, APART, layout=gl.SliceLayout(1, COLUMN))[:, None] * EACH
        o_n = o_n + gl.arange(0, EACH, layout=gl.SliceLayout(0, COLUMN))[None, :]
        b_s = gl.where(gl.expand_dims(o_n < left, 1), b_s, LOWEST)
    b_higher = gl.maximum(b_top, gl.max(b_s, 2))
    b_kept = gl.exp2(b_top - b_higher)
    b_p = gl.exp2(b_s - b_higher[:, :, None])
    if not IS_WHOLE:  # a warp may have none
        b_p = gl.where(gl.expand_dims(o_n < left, 1), b_p, 0.0)
    b_total = b_total * b_kept + gl.sum(b_p, 2)
    stage = i % STAGES
    mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
    b_values = w_smem.index(stage).reshape([APART, EACH, D]).load(RIGHT)
    if not IS_WHOLE:  # a slot past the end may hold NaN of a former owner, which a share of 0 does not hide
        o_v = gl.arange(0, APART, layout=gl.SliceLayout(1, OF_VALUE))[:, None] * EACH
        o_v = o_v + gl.arange(0, EACH, layout=gl.SliceLayout(0, OF_VALUE))[None, :]
        b_values = gl.where((o_v < left)[:, :, None], b_values, 0.0)
    b_acc = mma_v2(gl.convert_layout(b_p.to(gl.bfloat16), LEFT), b_values, b_acc * b_kept[:, :, None])
    release(free.index(stage))
    return b_higher, b_total, b_acc, i + 1


@gluon.jit
def over_context(
    w_smem, ready, free, i, b_q, begin, end, scale, TOKENS: gl.constexpr, APART: gl.constexpr, STAGES: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Queries [APART, M, D] over a part of what is cached. Of each row, for each of APART warps: the largest score,
    what the shares add up to, and the values' sum by these."""
    M: gl.constexpr = b_q.shape[1]
    b_top = gl.full([APART, M], LOWEST, gl.float32, gl.SliceLayout(2, MMA))
    b_total = gl.zeros([APART, M], gl.float32, gl.SliceLayout(2, MMA))
    b_acc = gl.zeros([APART, M, b_q.shape[2]], gl.float32, MMA)
    whole = (end - begin) // TOKENS
    for _ in range(whole):
        b_top, b_total, b_acc, i = over_stages(
            w_smem, ready, free, i, b_q, b_top, b_total, b_acc, TOKENS, scale, TOKENS, APART, STAGES, MMA, True
        )  # fmt: skip
    left = end - begin - whole * TOKENS
    if left > 0:
        b_top, b_total, b_acc, i = over_stages(
            w_smem, ready, free, i, b_q, b_top, b_total, b_acc, left, scale, TOKENS, APART, STAGES, MMA, False
        )  # fmt: skip
    return b_top, b_total, b_acc, i


@gluon.jit
def kept_rows(b_x, ROWS: gl.constexpr):
    """The first ROWS, all or half of them, of [.., M, ..]."""
    if b_x.shape[1] > ROWS:
        b_halves = gl.reshape(b_x, [b_x.shape[0], 2, ROWS, b_x.shape[2]])
        LAYOUT: gl.constexpr = b_halves.type.layout
        o_half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
        m_first = gl.expand_dims(gl.expand_dims(o_half[None, :], 2), 3) == 0
        b_x = gl.sum(gl.where(m_first, b_halves, 0.0), 1)
    return b_x


@gluon.jit
def attend(
    w_smem, x_smem, merge_smem, ready, free, p_qkv, p_cache, p_slot, p_query_norm, p_key_norm, p_cos, p_sin, p_parts,
    p_sums, p_done, go, n, i, pos, i_kv, i_split, eps, scale, stride_block, QH: gl.constexpr, KH: gl.constexpr,
    D: gl.constexpr, ALL: gl.constexpr, SPLITS: gl.constexpr, FEW: gl.constexpr, LONG: gl.constexpr,
    GROUP: gl.constexpr, CL: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, QK_NORM: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A group of a row's query heads over a split of its context; the last split's program adds the new token, and
    writes it. ALL: heads of all rows, which lie side by side. What splits give lies in p_parts [SPLITS + 1, ALL, D],
    and in p_sums [2, SPLITS, ALL] by how much it counts."""
    each, num = splits_of(pos, SPLITS, FEW, LONG, GROUP * CL * WIDE // D, S)
    if (i_kv < KH) & (i_split < num):
        i = attend_split(
            w_smem, x_smem, merge_smem, ready, free, p_qkv, p_cache, p_slot, p_query_norm, p_key_norm, p_cos, p_sin,
            p_parts, p_sums, go, n, i, pos, i_kv, i_split, each, num, eps, scale, stride_block, QH, KH, D, ALL, SPLITS,
            GROUP, CL, STAGES, S, QK_NORM, WARPS,
        )  # fmt: skip
        if SPLITS > FEW and num > FEW:
            thread_barrier()
            before = gl.atomic_add(p_done + i_kv * WIDE, 1, sem="acq_rel", scope="gpu")
            if before % num == num - 1:
                merge(p_parts, p_sums, i_kv, num, QH // KH, D, ALL, SPLITS, WARPS)
    else:
        mbarrier.wait(go, n & 1)
    return i


@gluon.jit
def attend_split(
    w_smem, x_smem, merge_smem, ready, free, p_qkv, p_cache, p_slot, p_query_norm, p_key_norm, p_cos, p_sin, p_parts,
    p_sums, go, n, i, pos, i_kv, i_split, each, num, eps, scale, stride_block, QH: gl.constexpr, KH: gl.constexpr,
    D: gl.constexpr, ALL: gl.constexpr, SPLITS: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr,
    STAGES: gl.constexpr, S: gl.constexpr, QK_NORM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One of `num` splits, of `each` tokens."""
    OF_GROUP: gl.constexpr = QH // KH
    ROWS: gl.constexpr = rows_of_group(OF_GROUP)
    M: gl.constexpr = 16 if ROWS < 16 else ROWS
    TOKENS: gl.constexpr = GROUP * CL * WIDE // D
    APART: gl.constexpr = warps_apart(TOKENS, WARPS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [APART, 1, WARPS // APART], [1, 16, 8])
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([APART, 1, 4], [1, 128 // D, D // 4], [1, WARPS, 1], [2, 1, 0])
    HEADS: gl.constexpr = gl.SliceLayout(0, OUT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    begin = gl.minimum(i_split * each, pos)
    end = gl.minimum(begin + each, pos)
    is_last = i_split == num - 1
    o_m = gl.arange(0, M, layout=gl.SliceLayout(1, Q))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, Q))
    o_other = (o_d + D // 2) % D
    o_out = gl.arange(0, D, layout=gl.SliceLayout(0, HEADS))
    b_cos = gl.load(p_cos + o_d).to(gl.float32)[None, :]
    b_sin = gl.load(p_sin + o_d).to(gl.float32)[None, :]
    b_qn, b_qo, b_kn, b_ko = b_cos, b_cos, b_cos, b_cos
    if QK_NORM:
        b_qn, b_qo = gl.load(p_query_norm + o_d)[None, :], gl.load(p_query_norm + o_other)[None, :]
        b_kn, b_ko = gl.load(p_key_norm + o_d)[None, :], gl.load(p_key_norm + o_other)[None, :]
    slot = gl.load(p_slot)
    mbarrier.wait(go, n & 1)
    p_query = p_qkv + ((i_kv * OF_GROUP + o_m % OF_GROUP) * D)[:, None]
    p_key = p_qkv + (QH + i_kv) * D
    b_qa = gl.load(p_query + o_d[None, :], cache_modifier=".cg")
    b_qb = gl.load(p_query + o_other[None, :], cache_modifier=".cg")
    b_ka = gl.load(p_key + o_d, cache_modifier=".cg")[None, :]
    b_kb = gl.load(p_key + o_other, cache_modifier=".cg")[None, :]
    b_v = gl.load(p_key + KH * D + o_out, cache_modifier=".cg")
    b_queries = turned(b_qa, b_qb, b_qn, b_qo, b_cos, b_sin, eps, QK_NORM)
    b_key = turned(b_ka, b_kb, b_kn, b_ko, b_cos, b_sin, eps, QK_NORM)
    if is_last & (slot >= 0):
        p_new = p_cache + (slot // S) * stride_block + (slot % S) * D + i_kv * (S * D)
        gl.store(p_new + o_d[None, :], b_key)
        gl.store(p_new + KH * (S * D) + o_out, b_v)
    news = merge_smem.index(2).slice(0, M)
    news.store(gl.sum(b_queries.to(gl.float32) * b_key.to(gl.float32), 1) * (scale * LOG2E))
    queries = x_smem._reinterpret(gl.bfloat16, [M, D], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    queries.store(b_queries)
    thread_barrier()
    b_q, _ = gl.broadcast(queries.reshape([1, M, D]).load(LEFT), gl.zeros([APART, M, D], gl.bfloat16, LEFT))
    b_top, b_total, b_acc, i = over_context(
        w_smem, ready, free, i, b_q, begin, end, scale * LOG2E, TOKENS, APART, STAGES, MMA
    )  # fmt: skip
    tops = merge_smem.index(0).slice(0, APART * ROWS)._reinterpret(gl.float32, [APART, ROWS, 1], FLAT)
    totals = merge_smem.index(1).slice(0, APART * ROWS)._reinterpret(gl.float32, [APART, ROWS, 1], FLAT)
    sums = x_smem._reinterpret(gl.float32, [APART, ROWS, D], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    thread_barrier()  # all have their queries
    sums.store(kept_rows(b_acc, ROWS))
    tops.store(kept_rows(b_top[:, :, None], ROWS))
    totals.store(kept_rows(b_total[:, :, None], ROWS))
    thread_barrier()
    b_new = news.slice(0, ROWS)._reinterpret(gl.float32, [ROWS, 1], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    b_new = gl.where(is_last, b_new.load(HEADS), LOWEST)
    b_top = tops.load(OUT)
    b_best = gl.maximum(gl.max(b_top, 0), b_new)
    b_factor = gl.exp2(b_top - b_best[None, :, :])
    b_share = gl.where(is_last, gl.exp2(b_new - b_best), 0.0)
    b_all = gl.sum(totals.load(OUT) * b_factor, 0) + b_share
    b_o = gl.sum(sums.load(OUT) * b_factor, 0) + b_share * b_v.to(gl.float32)[None, :]
    o_h = gl.arange(0, ROWS, layout=gl.SliceLayout(1, HEADS))[:, None]
    p_part = p_parts + (i_split * ALL + i_kv * OF_GROUP) * D
    gl.store(p_part + o_h * D + o_out[None, :], (b_o / b_all).to(gl.bfloat16), mask=o_h < OF_GROUP)
    p_sum = p_sums + i_split * ALL + i_kv * OF_GROUP + o_h
    gl.store(p_sum, b_best, mask=o_h < OF_GROUP)
    gl.store(p_sum + SPLITS * ALL, b_all, mask=o_h < OF_GROUP)
    return i


@gluon.jit
def merge(
    p_parts, p_sums, i_kv, num, HEADS: gl.constexpr, D: gl.constexpr, ALL: gl.constexpr, SPLITS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Puts together what the splits gave of HEADS query heads, behind all of them."""
    OWN: gl.constexpr = HEADS * D // (32 * WARPS)
    V: gl.constexpr = 1 if OWN < 1 else 8 if OWN > 8 else OWN
    THREADS: gl.constexpr = 32 if D // V > 32 else D // V
    BESIDE: gl.constexpr = D // (V * THREADS)
    M3: gl.constexpr = gl.BlockedLayout([1, 1, V], [1, 32 // THREADS, THREADS], [1, WARPS // BESIDE, BESIDE], [2, 1, 0])
    ROW: gl.constexpr = gl.SliceLayout(2, M3)
    o_s = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, ROW))
    o_h = i_kv * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(0, ROW))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, gl.SliceLayout(0, M3)))[None, :]
    m_s = (o_s < num)[:, None]
    p_sum = p_sums + o_s[:, None] * ALL + o_h[None, :]
    b_top = gl.load(p_sum, mask=m_s, other=LOWEST, cache_modifier=".cg")
    b_share = gl.load(p_sum + SPLITS * ALL, mask=m_s, other=0.0, cache_modifier=".cg")
    p_part = p_parts + (o_s[:, None] * ALL + o_h[None, :])[:, :, None] * D + gl.expand_dims(o_d, 0)
    b_parts = gl.load(p_part, mask=m_s[:, :, None], other=0.0, cache_modifier=".cg")
    b_share *= gl.exp2(b_top - gl.max(b_top, 0)[None, :])
    b_share = b_share / gl.sum(b_share, 0)[None, :]
    b_o = gl.sum(b_parts.to(gl.float32) * b_share[:, :, None], 0)
    o_row = i_kv * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(1, gl.SliceLayout(0, M3)))
    gl.store(p_parts + (SPLITS * ALL + o_row[:, None]) * D + o_d, b_o.to(gl.bfloat16))


@gluon.jit
def attended(
    p_parts, p_sums, x_smem, scale_smem, share_smem, pos, CHUNKS: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr,
    PARTS: gl.constexpr, QH: gl.constexpr, D: gl.constexpr, ALL: gl.constexpr, SPLITS: gl.constexpr, FEW: gl.constexpr,
    LONG: gl.constexpr, S: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Writes what a row's heads gave, of all splits, into x_smem."""
    HEADS: gl.constexpr = CL * WIDE * PARTS // D  # of a chunk
    XH: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    T: gl.constexpr = 32 if QH > 32 else QH
    SL: gl.constexpr = gl.BlockedLayout([1, 1], [32 // T, T], [WARPS, 1], [1, 0])  # each number is read by one thread
    _, num = splits_of(pos, SPLITS, FEW, LONG, GROUP * CL * WIDE // D, S)
    is_merged = num > FEW
    num = gl.where(is_merged, 1, num)
    p_given = p_parts + is_merged.to(gl.int32) * (SPLITS * ALL * D)
    o = (
        gl.arange(0, HEADS, layout=gl.SliceLayout(1, XH))[:, None] * D
        + gl.arange(0, D, layout=gl.SliceLayout(0, XH))[None, :]
    )
    parts = gl.tuple(())
    for c in gl.static_range(CHUNKS):
        for s in gl.static_range(FEW):
            p_part = p_given + (s * ALL + c * HEADS) * D
            parts = parts + gl.tuple((gl.load(p_part + o, mask=s < num, other=0.0, cache_modifier=".cg"),))
    o_s = gl.arange(0, FEW, layout=gl.SliceLayout(1, SL))[:, None]
    p_sum = p_sums + o_s * ALL + gl.arange(0, QH, layout=gl.SliceLayout(0, SL))[None, :]
    b_top = gl.load(p_sum, mask=o_s < num, other=LOWEST, cache_modifier=".cg")
    b_share = gl.load(p_sum + SPLITS * ALL, mask=o_s < num, other=0.0, cache_modifier=".cg")
    b_share *= gl.exp2(b_top - gl.max(b_top, 0)[None, :])
    share_smem.store(b_share / gl.sum(b_share, 0)[None, :])
    thread_barrier()
    shares = share_smem._reinterpret(gl.float32, [FEW * QH // HEADS, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for c in gl.static_range(CHUNKS):
        b_o = gl.zeros([HEADS, D], gl.float32, XH)
        for s in gl.static_range(FEW):
            b_own = shares.index(s * (QH // HEADS) + c).load(gl.SliceLayout(1, XH))
            b_o += b_own[:, None] * parts[c * FEW + s].to(gl.float32)
        chunk = gl.reshape(b_o.to(gl.bfloat16), [CL * WIDE * PARTS // 128, 128])
        store_chunk(x_smem, scale_smem, c, chunk, CL, PARTS, FORM)
    all_stored(FORM)
