# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Gated delta nets in Triton. Requests that bring few tokens: a program for each head takes its state, some rows at a
time, through all of them, and ends with the gated norm. It loads the next rows while it works on these, so that memory
never waits; what a state says of a key and of a query is summed up side by side, before the state changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from app.kernels.kernel_table import HOPPER, Candidate, Kernel, KernelTable, chosen
from app.kernels.launch import next_power_of_2
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import DeltaGates, DeltaHeads, GatedNorm, StateStep
from app.kernels.recurrent.early_steps import early_step
from app.kernels.recurrent.reference import UNIT_EPS
from app.kernels.recurrent.triton_math import softplus

STEP_NUMBERS, STEP_WARPS = 4096, 4  # of a state that a program works on at a time
ALONE_NUMBERS = 16384  # the same where there is one request, and all it waits for is one program

# Kernels of the requests behind the short ones: (mixed, heads, gates, norm, states, step, out).
CHUNKS: KernelTable[Kernel[[torch.Tensor, DeltaHeads], bool, Callable[..., None]]] = KernelTable(
    "prompts of gated delta nets",
    Candidate("app.kernels.recurrent.gluon_delta:KERNEL", HOPPER),
    Candidate("app.kernels.recurrent.triton_delta_chunks:KERNEL"),
)


@quick_launch
@triton.jit
def delta_step_kernel(
    p_mixed, p_a, p_b, p_a_log, p_dt_bias, p_gate, p_norm, p_states, p_starts, p_counts, p_sources, p_slots,
    p_out, stride_mixed, stride_a, stride_b, stride_gate, scale, rate_scale, eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    ROWS: tl.constexpr, LEN: tl.constexpr, EPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (R, HV): LEN tokens of a request, or as many of them as it says."""
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    i_key = i_h // (HV // HK)
    b_source, b_slot = tl.load(p_sources + i_r).to(tl.int64), tl.load(p_slots + i_r).to(tl.int64)
    b_first = tl.load(p_starts + i_r).to(tl.int64)
    o_k, o_r = tl.arange(0, BK), tl.arange(0, ROWS)
    m_k = o_k < DK
    o_tile = i_h * DV * DK + o_r[:, None] * DK + o_k[None, :]
    p_read = p_states + b_source * HV * DV * DK + o_tile
    p_left = p_states + b_slot * HV * DV * DK + o_tile
    m_tile = (o_r < DV)[:, None] & m_k[None, :]
    b_next = tl.load(p_read, mask=m_tile & (b_source >= 0), other=0.0)
    b_decay = -tl.exp(tl.load(p_a_log + i_h))
    b_bias = tl.load(p_dt_bias + i_h)
    if p_counts is None:
        b_count = LEN
    else:
        b_count = tl.load(p_counts + i_r)
    if EARLY:  # the launch before writes no states
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for i_v in tl.static_range(0, BV, ROWS):
        o_v = i_v + o_r
        m_v = o_v < DV
        b_state = b_next.to(tl.float32)
        if i_v + ROWS < BV:
            m_next = (o_v + ROWS < DV)[:, None] & m_k[None, :] & (b_source >= 0)
            b_next = tl.load(p_read + (i_v + ROWS) * DK, mask=m_next, other=0.0)
        for i in range(b_count):
            i_t = b_first + i
            p_row = p_mixed + i_t * stride_mixed
            b_q = tl.load(p_row + i_key * DK + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_k = tl.load(p_row + (HK + i_key) * DK + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_v = tl.load(p_row + 2 * HK * DK + i_h * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_q = b_q * tl.rsqrt(tl.sum(b_q * b_q, 0) + EPS) * scale
            b_k = b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + EPS)
            b_a = tl.load(p_a + i_t * stride_a + i_h).to(tl.float32)
            b_rate = tl.sigmoid(tl.load(p_b + i_t * stride_b + i_h).to(tl.float32)) * rate_scale
            b_kept = tl.exp(b_decay * softplus(b_a + b_bias))
            b_of_key, b_of_query = tl.sum(b_state * b_k[None, :], 1), tl.sum(b_state * b_q[None, :], 1)
            b_change = (b_v - b_of_key * b_kept) * b_rate
            b_o = b_of_query * b_kept + b_change * tl.sum(b_k * b_q, 0)
            b_state = b_state * b_kept + b_change[:, None] * b_k[None, :]
            tl.store(p_out + (i_t * HV + i_h) * DV + o_v, b_o.to(p_out.dtype.element_ty), mask=m_v)
        m_left = m_v[:, None] & m_k[None, :] & (b_slot >= 0)
        tl.store(p_left + i_v * DK, b_state, mask=m_left)
    tl.debug_barrier()  # all rows' results are there
    o_v = tl.arange(0, BV)
    m_v = o_v < DV
    b_weight = tl.load(p_norm + o_v, mask=m_v, other=0.0).to(tl.float32)
    for i in range(b_count):
        i_t = b_first + i
        p_result = p_out + (i_t * HV + i_h) * DV + o_v
        b_o = tl.load(p_result, mask=m_v, other=0.0).to(tl.float32)
        b_o = b_o * tl.rsqrt(tl.sum(b_o * b_o, 0) / DV + eps) * b_weight
        b_gate = tl.load(p_gate + i_t * stride_gate + i_h * DV + o_v, mask=m_v, other=0.0).to(tl.float32)
        tl.store(p_result, (b_o * b_gate * tl.sigmoid(b_gate)).to(p_out.dtype.element_ty), mask=m_v)


def gated_delta(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
) -> torch.Tensor:
    """The same as `reference.gated_delta`."""
    assert mixed.stride(1) == norm.gate.stride(1) == gates.a.stride(1) == gates.b.stride(1) == 1, "contiguous rows"
    assert states.is_contiguous(), "states must be contiguous"
    out = torch.empty(len(mixed), heads.num_values * heads.value_dim, dtype=mixed.dtype, device=mixed.device)
    if step.num_short:
        _few_tokens(mixed, heads, gates, norm, states, step, out)
    if step.num_long:
        delta_chunks, _ = chosen(CHUNKS.all_on(mixed.device), mixed, heads)
        delta_chunks(mixed, heads, gates, norm, states, step, out)
    return out


def _few_tokens(
    mixed: torch.Tensor,
    heads: DeltaHeads,
    gates: DeltaGates,
    norm: GatedNorm,
    states: torch.Tensor,
    step: StateStep,
    out: torch.Tensor,
) -> None:
    key_tile, value_tile = next_power_of_2(heads.key_dim), next_power_of_2(heads.value_dim)
    is_alone = step.num_short == 1 and mixed.dtype != torch.float32  # in fp32 the same for any number (I6)
    numbers = ALONE_NUMBERS if is_alone else STEP_NUMBERS
    delta_step_kernel[(step.num_short, heads.num_values)](
        mixed, gates.a, gates.b, gates.a_log, gates.dt_bias, norm.gate, norm.weight, states,
        step.starts, step.counts, step.sources, step.slots, out,
        mixed.stride(0), gates.a.stride(0), gates.b.stride(0), norm.gate.stride(0), heads.key_dim**-0.5,
        gates.rate_scale, norm.eps,
        HK=heads.num_keys, HV=heads.num_values, DK=heads.key_dim, DV=heads.value_dim, BK=key_tile, BV=value_tile,
        ROWS=min(value_tile, max(1, numbers // key_tile)), LEN=step.short_len, EPS=UNIT_EPS, num_warps=STEP_WARPS,
        **early_step(mixed.device, step),
    )  # fmt: skip
