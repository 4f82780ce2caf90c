# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""RMS norms of groups of channels, gated before or after, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch
from app.kernels.recurrent import GatedNorm

_TILE = 2048  # numbers of a program, where a group has fewer


@quick_launch
@triton.jit(do_not_specialize=["num_tokens"])
def gated_norm_kernel(
    p_x, p_gate, p_weight, p_out, num_tokens, stride_gate, eps,
    G: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, OF_GROUP: tl.constexpr,
    NORMS_FIRST: tl.constexpr, SIGMOID: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BT tokens, G)."""
    i_g = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # from the last one on, which was written last and is in cache
    o_t, o_d = (i_tile * BT + tl.arange(0, BT)).to(tl.int64), tl.arange(0, BD)
    m_td = (o_t < num_tokens)[:, None] & (o_d < D)[None, :]
    o_x = (o_t[:, None] * G + i_g) * D + o_d[None, :]
    b_x = tl.load(p_x + o_x, mask=m_td, other=0.0).to(tl.float32)
    p_gates = p_gate + o_t[:, None] * stride_gate + i_g * D + o_d[None, :]
    b_gate = tl.load(p_gates, mask=m_td, other=0.0).to(tl.float32)
    b_factor = tl.sigmoid(b_gate) if SIGMOID else b_gate * tl.sigmoid(b_gate)
    o_weight = i_g * D + o_d if OF_GROUP else o_d
    b_weight = tl.load(p_weight + o_weight, mask=o_d < D, other=0.0).to(tl.float32)
    if not NORMS_FIRST:
        b_x *= b_factor
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None] * b_weight[None, :]
    if NORMS_FIRST:
        b_x *= b_factor
    tl.store(p_out + o_x, b_x.to(p_out.dtype.element_ty), mask=m_td)


def write_gated_norm(x: torch.Tensor, norm: GatedNorm, out: torch.Tensor) -> None:
    """x [T, G, D], out [T, G * D], both in one piece."""
    num_tokens, groups, size = x.shape
    assert norm.gate.stride(1) == 1, "contiguous rows"
    tile = next_power_of_2(size)
    tokens = max(1, _TILE // tile)
    gated_norm_kernel[(cdiv(num_tokens, tokens), groups)](
        x, norm.gate, norm.weight, out, num_tokens, norm.gate.stride(0), norm.eps,
        G=groups, D=size, BT=tokens, BD=tile, OF_GROUP=len(norm.weight) > size,
        NORMS_FIRST=norm.norms_first, SIGMOID=norm.sigmoid, num_warps=min(8, tokens * tile // 512),
        **early_launch(x.device),
    )  # fmt: skip


def gated_norm(x: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """The same as `reference.gated_norm`."""
    out = torch.empty(len(x), x.shape[1] * x.shape[2], dtype=norm.gate.dtype, device=x.device)
    if len(x):
        write_gated_norm(x.contiguous(), norm, out)
    return out
