# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of one token within a whole step, in Gluon: a program has one query head and a part of the context."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from app.kernels.whole_step.gluon_copies import WIDE, D, split_of, thread_barrier
from app.kernels.whole_step.gluon_forms import all_stored, store_chunk
from app.kernels.whole_step.gluon_ring import release

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def turned(b_a, b_b, b_norm, b_other, b_cos, b_sin, eps, QK_NORM: gl.constexpr):
    """A head of queries or keys, normed and rotated: [2, D / 2]; b_b: its halves the other way round."""
    b_a, b_b = b_a.to(gl.float32), b_b.to(gl.float32)
    if QK_NORM:
        rms = gl.rsqrt(gl.sum(gl.sum(b_a * b_a, 1), 0) / D + eps)
        b_a = (b_a * rms * b_norm.to(gl.float32)).to(gl.bfloat16).to(gl.float32)
        b_b = (b_b * rms * b_other.to(gl.float32)).to(gl.bfloat16).to(gl.float32)
    return (b_a * b_cos + b_b * b_sin).to(gl.bfloat16).to(gl.float32)


@gluon.jit
def over_context(
    w_smem, ready, free, i, b_q, top, begin, end, GROUP: gl.constexpr, CL: gl.constexpr, STAGES: gl.constexpr,
    L3: gl.constexpr,
):  # fmt: skip
    """A query over a part of what is cached: the largest score, the others' shares and what they add up."""
    TOKENS: gl.constexpr = GROUP * CL // 2
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, L3))
    o_n = gl.arange(0, TOKENS, layout=ROW)
    b_sum = gl.zeros([TOKENS], gl.float32, ROW)
    b_acc = gl.zeros([TOKENS, 2, D // 2], gl.float32, L3)
    for first in range(begin, end, TOKENS):
        m_n = first + o_n < end
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        b_keys = w_smem.index(stage).reshape([TOKENS, 2, D // 2]).load(L3).to(gl.float32)
        b_s = gl.where(m_n, gl.sum(gl.sum(b_keys * b_q[None, :, :], 2), 1), -1e30)
        release(free.index(stage))
        i += 1
        higher = gl.maximum(top, gl.max(b_s, 0))
        kept = gl.exp2(top - higher)
        b_p = gl.where(m_n, gl.exp2(b_s - higher), 0.0)
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        b_values = w_smem.index(stage).reshape([TOKENS, 2, D // 2]).load(L3).to(gl.float32)
        # A slot past the end may hold NaN of a former owner, which a weight of 0 does not hide.
        b_values = gl.where(gl.expand_dims(gl.expand_dims(m_n, 1), 2), b_values, 0.0)
        b_acc = b_acc * kept + gl.expand_dims(gl.expand_dims(b_p, 1), 2) * b_values
        release(free.index(stage))
        i += 1
        b_sum = b_sum * kept + b_p
        top = higher
    return top, gl.sum(b_sum, 0), gl.sum(b_acc, 0), i


@gluon.jit
def attend(
    w_smem, ready, free, p_qkv, p_cache, p_slot, p_query_norm, p_key_norm, p_cos, p_sin, p_parts, p_sums, go, n, i, i_p,
    pos, eps, scale, stride_block, QH: gl.constexpr, KH: gl.constexpr, SPLITS: gl.constexpr, GROUP: gl.constexpr,
    CL: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, QK_NORM: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A query head over a split of its context; the last split's program adds the new token, and writes it."""
    L3: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 2, 8], [WARPS, 1, 1], [2, 1, 0])
    HEAD: gl.constexpr = gl.SliceLayout(0, L3)
    i_split = i_p % SPLITS
    head = i_p // SPLITS
    o_d = (
        gl.arange(0, 2, layout=gl.SliceLayout(1, HEAD))[:, None] * (D // 2)
        + gl.arange(0, D // 2, layout=gl.SliceLayout(0, HEAD))[None, :]
    )
    if head < QH:
        i_kv = head // (QH // KH)
        begin, end = split_of(pos, i_split, SPLITS, S)
        b_cos, b_sin = gl.load(p_cos + o_d).to(gl.float32), gl.load(p_sin + o_d).to(gl.float32)
        b_qn, b_qo, b_kn, b_ko = b_cos, b_cos, b_cos, b_cos
        if QK_NORM:
            b_qn, b_qo = gl.load(p_query_norm + o_d), gl.load(p_query_norm + (o_d ^ (D // 2)))
            b_kn, b_ko = gl.load(p_key_norm + o_d), gl.load(p_key_norm + (o_d ^ (D // 2)))
        slot = gl.load(p_slot)
        mbarrier.wait(go, n & 1)
        p_query, p_key = p_qkv + head * D, p_qkv + (QH + i_kv) * D
        b_qa = gl.load(p_query + o_d, cache_modifier=".cg")
        b_qb = gl.load(p_query + (o_d ^ (D // 2)), cache_modifier=".cg")
        b_ka = gl.load(p_key + o_d, cache_modifier=".cg")
        b_kb = gl.load(p_key + (o_d ^ (D // 2)), cache_modifier=".cg")
        b_v = gl.load(p_key + KH * D + o_d, cache_modifier=".cg")
        b_q = turned(b_qa, b_qb, b_qn, b_qo, b_cos, b_sin, eps, QK_NORM) * (scale * LOG2E)
        b_k = turned(b_ka, b_kb, b_kn, b_ko, b_cos, b_sin, eps, QK_NORM)
        is_last = i_split == SPLITS - 1
        new = gl.where(is_last, gl.sum(gl.sum(b_q * b_k, 1), 0), -1e30)
        if is_last & (head % (QH // KH) == 0) & (slot >= 0):
            p_new = p_cache + (slot // S) * stride_block + (slot % S) * D + i_kv * (S * D)
            gl.store(p_new + o_d, b_k.to(gl.bfloat16))
            gl.store(p_new + KH * (S * D) + o_d, b_v)
        top, total, b_o, i = over_context(w_smem, ready, free, i, b_q, new, begin, end, GROUP, CL, STAGES, L3)
        share = gl.where(is_last, gl.exp2(new - top), 0.0)
        total += share
        b_o = (b_o + share * b_v.to(gl.float32)) / gl.maximum(total, 1e-30)
        gl.store(p_parts + (i_split * QH + head) * D + o_d, b_o.to(gl.bfloat16))
        gl.store(p_sums + i_split * QH + head, top)
        gl.store(p_sums + (SPLITS + i_split) * QH + head, total)
    else:
        mbarrier.wait(go, n & 1)
    return i


@gluon.jit
def attended(
    p_parts, p_sums, x_smem, scale_smem, share_smem, CHUNKS: gl.constexpr, CL: gl.constexpr, PARTS: gl.constexpr,
    QH: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Writes what all heads gave, of all splits, into x_smem."""
    HEADS: gl.constexpr = CL * WIDE * PARTS // D  # of a chunk
    XH: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    T: gl.constexpr = 32 if QH > 32 else QH
    SL: gl.constexpr = gl.BlockedLayout([1, 1], [32 // T, T], [WARPS, 1], [1, 0])  # each number is read by one thread
    o = (
        gl.arange(0, HEADS, layout=gl.SliceLayout(1, XH))[:, None] * D
        + gl.arange(0, D, layout=gl.SliceLayout(0, XH))[None, :]
    )
    parts = gl.tuple(())
    for c in gl.static_range(CHUNKS):
        for s in gl.static_range(SPLITS):
            p_part = p_parts + (s * QH + c * HEADS) * D
            parts = parts + gl.tuple((gl.load(p_part + o, cache_modifier=".cg"),))
    o_s = (
        gl.arange(0, SPLITS, layout=gl.SliceLayout(1, SL))[:, None] * QH
        + gl.arange(0, QH, layout=gl.SliceLayout(0, SL))[None, :]
    )
    b_top = gl.load(p_sums + o_s, cache_modifier=".cg")
    b_share = gl.load(p_sums + SPLITS * QH + o_s, cache_modifier=".cg")
    b_share *= gl.exp2(b_top - gl.max(b_top, 0)[None, :])
    share_smem.store(b_share / gl.sum(b_share, 0)[None, :])
    thread_barrier()
    shares = share_smem._reinterpret(gl.float32, [SPLITS * QH // HEADS, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for c in gl.static_range(CHUNKS):
        b_o = gl.zeros([HEADS, D], gl.float32, XH)
        for s in gl.static_range(SPLITS):
            b_own = shares.index(s * (QH // HEADS) + c).load(gl.SliceLayout(1, XH))
            b_o += b_own[:, None] * parts[c * SPLITS + s].to(gl.float32)
        store_chunk(x_smem, scale_smem, c, b_o.to(gl.bfloat16), CL, PARTS, FORM)
    all_stored(FORM)
