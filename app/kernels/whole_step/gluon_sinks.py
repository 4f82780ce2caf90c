# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of one token within a whole step where a group's heads of 64 share their keys, in Gluon: a program has all
query heads of a group and a part of what they see. Layers may have a window, and heads a sink."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from app.kernels.whole_step.gluon_attend import LOG2E
from app.kernels.whole_step.gluon_copies import WIDE, room, thread_barrier
from app.kernels.whole_step.gluon_ring import release

D = gl.constexpr(64)  # of a head: a line
HEADS = gl.constexpr(16)  # a tile of them, of which a group has some
TOKENS = gl.constexpr(128)  # of a stage
BOX = gl.constexpr(16)  # tokens of a box, which lie in one block of the cache
AT_ONCE = gl.constexpr(8)  # splits whose results are on their way together


@gluon.jit
def seen_of(pos, window, SPLITS: gl.constexpr):
    """The first token that is seen, where splits of those before `pos` begin, their length, and how many there are."""
    first = gl.where(window > 0, gl.maximum(pos + 1 - window, 0), 0)
    begin = first // BOX * BOX
    MANY: gl.constexpr = AT_ONCE if SPLITS > AT_ONCE else SPLITS
    tiles = gl.cdiv(pos - begin, TOKENS)
    used = gl.where(tiles <= MANY, gl.maximum(tiles, 1), gl.where(tiles <= 2 * MANY, MANY, SPLITS))
    each = gl.cdiv(gl.cdiv(pos - begin, used), BOX) * BOX
    return first, begin, each, used


@gluon.jit
def copy_keys(
    d_lines, pieces, ready, free, i, base, p_table, pos, window, i_p, KH: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, S: gl.constexpr, ARRIVALS: gl.constexpr,
):  # fmt: skip
    """Keys and values of this program's split."""
    GROUP: gl.constexpr = TOKENS // BOX
    i_kv = i_p // SPLITS
    _, begin, each, used = seen_of(pos, window, SPLITS)
    if (i_kv < KH) & (i_p % SPLITS < used):
        begin = gl.minimum(begin + i_p % SPLITS * each, pos)
        end = gl.minimum(begin + each, pos)
        for at in range(begin, end, TOKENS):
            tokens = gl.tuple(())
            blocks = gl.tuple(())
            for r in gl.static_range(GROUP):  # all are on their way before a copy is told
                tokens = tokens + gl.tuple((gl.minimum(at + r * BOX, (end - 1) // BOX * BOX),))
                blocks = blocks + gl.tuple((gl.load(p_table + tokens[r] // S),))
            for part in gl.static_range(2):
                stage = room(ready, free, i, STAGES, AHEAD)
                mbarrier.expect(ready.index(stage), TOKENS * WIDE * 2)
                for r in gl.static_range(GROUP):
                    line = base + ((blocks[r] * 2 + part) * KH + i_kv) * S + tokens[r] % S
                    tma.async_copy_global_to_shared(
                        d_lines, [line, 0], ready.index(stage), pieces.index(stage * GROUP + r)
                    )
                mbarrier.arrive(ready.index(stage), count=ARRIVALS - 1)
                i += 1
    return i


@gluon.jit
def attend(
    w_smem, ready, free, p_qkv, p_cache, p_slot, p_sinks, p_cos, p_sin, p_parts, p_sums, go, n, i, i_p, pos, window,
    scale, stride_block, QH: gl.constexpr, KH: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    S: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """A group's heads over a split of what they see; the last split's program adds the new token and the sinks, and
    writes the token."""
    GROUP: gl.constexpr = QH // KH
    HB: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    VECTOR: gl.constexpr = gl.SliceLayout(0, HB)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    i_split = i_p % SPLITS
    i_kv = i_p // SPLITS
    first, begin, each, used = seen_of(pos, window, SPLITS)
    if (i_kv < KH) & (i_split < used):
        begin = gl.minimum(begin + i_split * each, pos)
        end = gl.minimum(begin + each, pos)
        o_d = gl.arange(0, D, layout=VECTOR)
        o_h = gl.minimum(gl.arange(0, HEADS, layout=gl.SliceLayout(1, HB)), GROUP - 1)
        o_q = (i_kv * GROUP + o_h)[:, None] * D + o_d[None, :]
        o_m = gl.arange(0, HEADS, layout=ROW)
        b_cos, b_sin = gl.load(p_cos + o_d).to(gl.float32), gl.load(p_sin + o_d).to(gl.float32)
        b_sink = gl.load(p_sinks + i_kv * GROUP + gl.minimum(o_m, GROUP - 1)) * LOG2E
        slot = gl.load(p_slot)
        mbarrier.wait(go, n & 1)
        p_key = p_qkv + (QH + i_kv) * D
        b_qa = gl.load(p_qkv + o_q, cache_modifier=".cg").to(gl.float32)
        b_qb = gl.load(p_qkv + (o_q ^ (D // 2)), cache_modifier=".cg").to(gl.float32)
        b_ka = gl.load(p_key + o_d, cache_modifier=".cg").to(gl.float32)
        b_kb = gl.load(p_key + (o_d ^ (D // 2)), cache_modifier=".cg").to(gl.float32)
        b_v = gl.load(p_key + KH * D + o_d, cache_modifier=".cg")
        b_q = (b_qa * b_cos[None, :] + b_qb * b_sin[None, :]).to(gl.bfloat16)
        b_k = (b_ka * b_cos + b_kb * b_sin).to(gl.bfloat16)
        b_new = gl.sum(b_q.to(gl.float32) * b_k.to(gl.float32)[None, :], 1) * (scale * LOG2E)
        b_new = gl.convert_layout(b_new, ROW)
        is_last = i_split == used - 1
        if is_last & (slot >= 0):
            p_new = p_cache + (slot // S) * stride_block + (slot % S) * D + i_kv * (S * D)
            gl.store(p_new + o_d, b_k)
            gl.store(p_new + KH * (S * D) + o_d, b_v)
        top = gl.where(is_last, gl.maximum(b_new, b_sink), -1e30)
        b_query = gl.convert_layout(b_q, A)
        b_sum = gl.zeros([HEADS], gl.float32, ROW)
        b_acc = gl.zeros([HEADS, D], gl.float32, MMA)
        o_n = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))
        o_k = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, B))
        for at in range(begin, end, TOKENS):
            m_n = (at + o_n >= first) & (at + o_n < end)
            stage = i % STAGES
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            b_keys = w_smem.index(stage).permute((1, 0)).load(B)
            b_s = mma_v2(b_query, b_keys, gl.zeros([HEADS, TOKENS], gl.float32, MMA)) * (scale * LOG2E)
            release(free.index(stage))
            i += 1
            b_s = gl.where(m_n[None, :], b_s, -1e30)
            higher = gl.maximum(top, gl.max(b_s, 1))
            kept = gl.exp2(top - higher)
            b_p = gl.where(m_n[None, :], gl.exp2(b_s - higher[:, None]), 0.0)
            b_shares = gl.convert_layout(b_p.to(gl.bfloat16), A)
            stage = i % STAGES
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            b_values = w_smem.index(stage).load(B)
            # A slot past the end may hold NaN of a former owner, which a weight of 0 does not hide.
            m_k = (at + o_k >= first) & (at + o_k < end)
            b_values = gl.where(m_k[:, None], b_values, gl.zeros([TOKENS, D], gl.bfloat16, B))
            b_acc = mma_v2(b_shares, b_values, b_acc * kept[:, None])
            release(free.index(stage))
            i += 1
            b_sum = b_sum * kept + gl.sum(b_p, 1)
            top = higher
        b_share = gl.where(is_last, gl.exp2(b_new - top), 0.0)
        total = b_sum + b_share + gl.where(is_last, gl.exp2(b_sink - top), 0.0)
        b_value = gl.convert_layout(b_v.to(gl.float32), gl.SliceLayout(0, MMA))
        b_o = (b_acc + b_share[:, None] * b_value[None, :]) / gl.maximum(total, 1e-30)[:, None]
        o_o = gl.arange(0, D, layout=gl.SliceLayout(0, MMA))
        at_head = i_split * QH + i_kv * GROUP + o_m
        gl.store(p_parts + (at_head[:, None] * D + o_o[None, :]), b_o.to(gl.bfloat16), mask=(o_m < GROUP)[:, None])
        gl.store(p_sums + at_head, top, mask=o_m < GROUP)
        gl.store(p_sums + SPLITS * QH + at_head, total, mask=o_m < GROUP)
    else:
        mbarrier.wait(go, n & 1)
    return i


@gluon.jit
def attended(
    p_parts, p_sums, x_smem, share_smem, pos, window, QH: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr
):
    """Writes what all heads gave, of all splits, into x_smem, a line a head."""
    XH: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SL: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    _, _, _, used = seen_of(pos, window, SPLITS)
    o_s = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, SL))[:, None]
    o_h = gl.arange(0, QH, layout=gl.SliceLayout(0, SL))[None, :]
    b_top = gl.load(p_sums + (o_s * QH + o_h), mask=o_s < used, other=-1e30, cache_modifier=".cg")
    b_share = gl.load(p_sums + ((SPLITS + o_s) * QH + o_h), mask=o_s < used, other=0.0, cache_modifier=".cg")
    o = (
        gl.arange(0, QH, layout=gl.SliceLayout(1, XH))[:, None] * D
        + gl.arange(0, D, layout=gl.SliceLayout(0, XH))[None, :]
    )
    b_share *= gl.exp2(b_top - gl.max(b_top, 0)[None, :])
    share_smem.store(b_share / gl.sum(b_share, 0)[None, :])
    thread_barrier()
    shares = share_smem._reinterpret(gl.float32, [SPLITS, QH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    b_o = gl.zeros([QH, D], gl.float32, XH)
    for s in range(0, used, AT_ONCE):
        parts = gl.tuple(())
        for k in gl.static_range(AT_ONCE):
            m = (o >= 0) & (s + k < used)
            parts = parts + gl.tuple(
                (gl.load(p_parts + ((s + k) * (QH * D) + o), mask=m, other=0.0, cache_modifier=".cg"),)
            )
        for k in gl.static_range(AT_ONCE):
            b_own = shares.index(gl.minimum(s + k, SPLITS - 1)).load(gl.SliceLayout(1, XH))
            b_o += b_own[:, None] * parts[k].to(gl.float32)
    heads = x_smem._reinterpret(gl.bfloat16, [x_smem.shape[0] * x_smem.shape[1] // QH, QH, D], x_smem.layout)
    heads.index(0).store(b_o.to(gl.bfloat16))
    fence_async_shared()  # the tensor cores read it
    thread_barrier()
