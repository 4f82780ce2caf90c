# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
"""Merges what the splits of a context gave, in the program that finishes the last of them or in a launch behind."""

from __future__ import annotations

import triton
import triton.language as tl

from app.kernels.attention.triton_splits import cut_context
from app.kernels.attention.triton_tile import NO_MAX, weight_of_sink
from app.kernels.quick_launch import quick_launch


@triton.jit
def rows_of(i_r, i_head, o_row, G: tl.constexpr, Q: tl.constexpr):
    """(token int64, query head) of rows of a KV head's tile: of one query after the other, all its heads."""
    o_token = i_r.to(tl.int64) * Q + o_row * 0
    o_head = i_head * G + o_row
    if Q > 1:
        o_token += o_row // G
        o_head = i_head * G + o_row % G
    return o_token, o_head


@triton.jit
def places_of(i_r, i_head, num_heads, i_first, stride_split, G: tl.constexpr, Q: tl.constexpr, PACKED: tl.constexpr):
    """(place int64 of the first row's result of a request's first split, places from row to row, from split to split)
    of a KV head. PACKED: a step's splits lie one behind the other, i_first is the request's first one; else a request
    has room for stride_split of them."""
    if PACKED:
        return (i_first.to(tl.int64) * num_heads + i_head) * (Q * G), 1, num_heads * (Q * G)
    else:
        return (i_r.to(tl.int64) * num_heads + i_head) * (Q * G) * stride_split, stride_split, 1


@triton.jit
def done_before(p_count):
    """Returns how many of a head's splits were done before this one. One thread counts for all: the first barrier has
    their partial results written before it does, the second has none of them read before it has."""
    tl.debug_barrier()
    num_before = tl.atomic_add(p_count, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return num_before


@triton.jit(noinline=True)
def merge_splits(
    i_r, i_head, first, num_splits, p_partial, p_log_sum, p_sinks, p_out,
    stride_out_token, stride_out_head, stride_row, stride_next,
    G: tl.constexpr, Q: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_RUNS: tl.constexpr,  # a partial may cover several splits; those after its first have a log_sum of NO_MAX
):  # fmt: skip
    """out = sum of partials weighted by exp2(log_sum - their total), for Q * G query heads of a KV head; the loads of
    BS splits are under way at a time. They pass by L1, which knows nothing of what other multiprocessors wrote. Where
    they lie: see `places_of`.

    A function of its own to the compiler too: inline, a third more registers would hold what is computed ahead for it.
    """
    o_g = tl.arange(0, BG)
    o_token, o_head = rows_of(i_r, i_head, o_g, G, Q)
    m_g = o_g < Q * G
    o_first = first + o_g * stride_row
    o_all = tl.arange(0, MAX_SPLITS)
    m_all = m_g[:, None] & (o_all[None, :] < num_splits)
    p_logs = p_log_sum + o_first[:, None] + o_all[None, :] * stride_next
    b_logs = tl.load(p_logs, mask=m_all, other=NO_MAX, cache_modifier=".cg")
    b_max = tl.max(b_logs, 1)
    b_total = tl.sum(tl.exp2(b_logs - b_max[:, None]), 1)
    if p_sinks is not None:  # once, whatever the number of splits
        b_total += weight_of_sink(tl.load(p_sinks + o_head, mask=m_g, other=0.0), b_max)
    o_d = tl.arange(0, BD)
    m_o = m_g[:, None] & (o_d[None, :] < D)
    b_out = tl.zeros([BG, BD], dtype=tl.float32)
    for i_s in range(0, num_splits, BS):
        logs, parts = (), ()  # all loads come before the barriers that take weights from thread to thread
        for i in tl.static_range(BS):
            m_log = m_g & (i_s + i < num_splits)
            p_log = p_log_sum + o_first + (i_s + i) * stride_next
            b_log = tl.load(p_log, mask=m_log, other=NO_MAX, cache_modifier=".cg")
            if HAS_RUNS:
                m_log = b_log > NO_MAX
            p_part = p_partial + (o_first + (i_s + i) * stride_next)[:, None] * D + o_d[None, :]
            b_part = tl.load(p_part, mask=m_log[:, None] & (o_d[None, :] < D), other=0.0, cache_modifier=".cg")
            logs, parts = logs + (b_log,), parts + (b_part,)  # noqa: RUF005 (the compiler knows no unpacking)
        for i in tl.static_range(BS):
            b_out += parts[i] * tl.exp2(logs[i] - b_max)[:, None]
    p_o = p_out + o_token[:, None] * stride_out_token + o_head[:, None] * stride_out_head + o_d[None, :]
    tl.store(p_o, (b_out / b_total[:, None]).to(p_out.dtype.element_ty), mask=m_o)


@quick_launch
@triton.jit(do_not_specialize=["stride_split"])
def merge_kernel(
    p_partial, p_log_sum, p_sinks, p_out, p_seq_lens, stride_out_token, stride_out_head, stride_split,
    G: tl.constexpr, BG: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr,
):  # fmt: skip
    """Grid (Hkv, Rd): the merge after shared splits, whose partial results come from two kernels. No window."""
    i_r = tl.program_id(1)
    b_len = tl.load(p_seq_lens + i_r)
    _, _, split = cut_context(b_len, 0, BN, False, MAX_SPLITS, SPLIT_KEYS)
    num_splits = tl.cdiv(b_len, split)
    if num_splits > 1:  # else decode_kernel wrote the output itself
        i_head = tl.program_id(0)
        first, stride_row, stride_next = places_of(i_r, i_head, tl.num_programs(0), 0, stride_split, G, 1, False)
        merge_splits(
            i_r, i_head, first, num_splits, p_partial, p_log_sum, p_sinks, p_out,
            stride_out_token, stride_out_head, stride_row, stride_next, G, 1, BG, D, BD, BS, MAX_SPLITS, True,
        )  # fmt: skip
