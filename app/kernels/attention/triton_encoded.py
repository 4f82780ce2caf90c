# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of single tokens to an encoder's output on a GPU, whose keys and values lie in slots that nobody writes
meanwhile.

A step only reads what an earlier step has left in a slot, or this step's first launches. So a program loads its keys
and values before it waits for the kernel that makes the queries, and that many bytes are on their way beside the
product. Splits are cut by the most positions that a slot has, and merged as in triton_merge.py: by the program that is
done last, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.attention import EncodedAttention, EncodedStep
from app.kernels.attention.triton_merge import done_before
from app.kernels.attention.triton_tile import LOG2_E, NO_MAX
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

_KEYS = 128
_THREAD_ELEMENTS = 128  # of the keys that a thread holds, and as many of the values
_MOST_HEAD_DIM, _MOST_SPLITS = 128, 32
_FEW_TOKENS = 4  # of a step, whose programs leave room for those of the next kernel


@quick_launch
@triton.jit
def encoded_kernel(
    p_q, p_cache, p_out, p_partial, p_sums, p_arrived, p_slots, p_lens, scale, blocks,
    stride_q_token, stride_q_head, stride_block, stride_value, stride_head, stride_slot,
    H: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr,
    LEAVES_ROOM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (H, SPLITS, T): one head of a token over BN positions of its slot, which is `blocks` blocks."""
    i_head, i_split, i_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b_slot, b_len = tl.load(p_slots + i_t), tl.load(p_lens + i_t)
    o_n, o_d = i_split * BN + tl.arange(0, BN), tl.arange(0, D)
    m_n = o_n < b_len
    p_k = p_cache + (b_slot * blocks + o_n // S).to(tl.int64)[:, None] * stride_block + i_head * stride_head
    p_k += (o_n % S)[:, None] * stride_slot + o_d[None, :]
    b_k = tl.load(p_k, mask=m_n[:, None], other=0.0)
    b_v = tl.load(p_k + stride_value, mask=m_n[:, None], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if LEAVES_ROOM:
            tl.extra.cuda.gdc_launch_dependents()
    b_q = tl.load(p_q + i_t.to(tl.int64) * stride_q_token + i_head * stride_q_head + o_d).to(tl.float32)
    b_s = tl.sum(b_k.to(tl.float32) * b_q[None, :], 1) * (scale * LOG2_E)
    b_s = tl.where(m_n, b_s, float("-inf"))
    b_max = tl.maximum(tl.max(b_s, 0), NO_MAX)
    b_p = tl.exp2(b_s - b_max)
    b_own = tl.sum(b_v.to(tl.float32) * b_p[:, None], 0)
    i_first = (i_t.to(tl.int64) * H + i_head) * SPLITS
    p_sum = p_sums + (i_first + i_split) * 2
    tl.store(p_partial + (i_first + i_split) * D + o_d, b_own)
    tl.store(p_sum, b_max)
    tl.store(p_sum + 1, tl.sum(b_p, 0))
    p_count = p_arrived + i_t * H + i_head
    if done_before(p_count) == SPLITS - 1:
        o_s = tl.arange(0, BS)
        m_s = o_s < SPLITS
        p_all = p_sums + (i_first + o_s) * 2
        b_maxima = tl.load(p_all, mask=m_s, other=NO_MAX, cache_modifier=".cg")
        b_totals = tl.load(p_all + 1, mask=m_s, other=0.0, cache_modifier=".cg")
        p_parts = p_partial + (i_first + o_s)[:, None] * D + o_d[None, :]
        b_parts = tl.load(p_parts, mask=m_s[:, None], other=0.0, cache_modifier=".cg")
        b_weights = tl.exp2(b_maxima - tl.max(b_maxima, 0))
        b_merged = tl.sum(b_parts * b_weights[:, None], 0) / tl.sum(b_totals * b_weights, 0)
        tl.store(p_out + (i_t.to(tl.int64) * H + i_head) * D + o_d, b_merged.to(p_out.dtype.element_ty))
        tl.store(p_count, 0)  # for the next layer


class EncodedScratch:
    """Holds what the programs of a layer pass to each other; made once a step, used by every layer."""

    def __init__(self, num_tokens: int, num_heads: int, head_dim: int, splits: int, device: torch.device) -> None:
        shape = (num_tokens, num_heads, splits)
        self.partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self.sums = torch.empty(*shape, 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(num_tokens, num_heads, dtype=torch.int32, device=device)


def attend_encoded(query: torch.Tensor, kv_cache: torch.Tensor, step: EncodedStep, scale: float) -> torch.Tensor:
    """See EncodedAttention."""
    (num_tokens, num_heads, head_dim), block_size = query.shape, kv_cache.shape[3]
    assert query.stride(2) == kv_cache.stride(4) == 1, "head vectors must be contiguous"
    splits = cdiv(step.num_positions, _KEYS)
    if not isinstance(step.scratch, EncodedScratch):
        step.scratch = EncodedScratch(num_tokens, num_heads, head_dim, splits, query.device)
    scratch, out = step.scratch, torch.empty(query.shape, dtype=query.dtype, device=query.device)
    encoded_kernel[(num_heads, splits, num_tokens)](
        query, kv_cache, out, scratch.partial, scratch.sums, scratch.arrived, step.slots, step.lengths, scale,
        cdiv(step.num_positions, block_size), query.stride(0), query.stride(1), *kv_cache.stride()[:4],
        H=num_heads, D=head_dim, S=block_size, BN=_KEYS, SPLITS=splits, BS=next_power_of_2(splits),
        LEAVES_ROOM=num_tokens <= _FEW_TOKENS, num_warps=max(1, _KEYS * head_dim // (32 * _THREAD_ELEMENTS)),
        **early_launch(query.device),
    )  # fmt: skip
    return out


def encoded_kernel_for(head_dim: int, num_positions: int) -> EncodedAttention | None:
    """See AttentionOps.encoded."""
    is_whole = head_dim == next_power_of_2(head_dim) and head_dim <= _MOST_HEAD_DIM
    return attend_encoded if is_whole and cdiv(num_positions, _KEYS) <= _MOST_SPLITS else None
