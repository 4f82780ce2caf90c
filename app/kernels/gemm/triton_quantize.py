# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Activations as int8 or fp8 on a GPU, in the order in which packed weights have their bytes (stored.py)."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from app.kernels.fused.triton_ops import activate
from app.kernels.gemm import DeferredActivation, NumberKind, QuantizedNorm
from app.kernels.gemm.stored import BLOCK
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

_FP8 = 448.0
_INT8 = 127.0
_LEAST_SCALE = 1e-12
_BLOCKS = 8  # of a program, at most, where each has a scale of its own
_WARP_BLOCKS = 4  # of a warp: 16 numbers of a thread
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float added to it is rounded to a whole number


@triton.jit
def divided(b_x, b_scale, b_inverse):
    """b_x / b_scale, rounded once, in three instructions (Markstein, 1990); b_inverse: 1 / b_scale, rounded."""
    b_quotient = b_x * b_inverse
    return tl.fma(tl.fma(-b_quotient, b_scale, b_x), b_inverse, b_quotient)


@triton.jit
def scales_of(b_low, b_high, BLOCKS: tl.constexpr, BY_BLOCKS: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    """Scales [BLOCKS] of the halves of a row's blocks: each block's own, or the row's."""
    b_largest = tl.max(tl.maximum(tl.abs(b_low), tl.abs(b_high)), 1)
    if not BY_BLOCKS:
        b_largest = tl.max(b_largest, 0) + tl.zeros([BLOCKS], dtype=tl.float32)
    return tl.maximum(tl.div_rn(b_largest, LARGEST), LEAST)


@triton.jit
def rounded(b_low, b_high, b_scale, p_zero, DTYPE: tl.constexpr, BLOCKS: tl.constexpr, LARGEST: tl.constexpr):
    """[BLOCKS, BLOCK] numbers of DTYPE, the halves of a block in turn, by their scales."""
    b_inverse = tl.div_rn(1.0 + tl.zeros([BLOCKS], dtype=tl.float32), b_scale)[:, None]
    b_low = divided(b_low, b_scale[:, None], b_inverse)
    b_high = divided(b_high, b_scale[:, None], b_inverse)
    b_x = tl.interleave(b_low, b_high)
    if tl.int8 == DTYPE:
        if p_zero is not None:
            b_x += tl.load(p_zero).to(tl.float32)
        b_x = tl.minimum(tl.maximum((b_x + _ROUND) - _ROUND, -128.0), 127.0)
    else:
        b_x = tl.minimum(tl.maximum(b_x, -LARGEST), LARGEST)
    return b_x.to(DTYPE)


@quick_launch
@triton.jit(do_not_specialize=["stride_group"])
def add_norm_quantize_kernel(
    p_x, p_residual, p_weight, p_total, p_out, p_scale, stride_x, stride_residual, stride_group, K, row, eps,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, BY_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): p_total [T, K] = x + residual, and its RMS norm, rounded, as `quantize_kernel` makes it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t = tl.program_id(0).to(tl.int64)
    o_block, o_j = tl.arange(0, BLOCKS), tl.arange(0, BLOCK // 2)
    o_low = o_block[:, None] * BLOCK + o_j[None, :]
    o_high = o_low + BLOCK // 2
    m_low, m_high = o_low < K, o_high < K
    p_row, p_r, p_t = p_x + i_t * stride_x, p_residual + i_t * stride_residual, p_total + i_t * K
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    b_low = tl.load(p_row + o_low, mask=m_low, other=0.0).to(tl.float32)
    b_high = tl.load(p_row + o_high, mask=m_high, other=0.0).to(tl.float32)
    b_low = (b_low + tl.load(p_r + o_low, mask=m_low, other=0.0).to(tl.float32)).to(DTYPE)
    b_high = (b_high + tl.load(p_r + o_high, mask=m_high, other=0.0).to(tl.float32)).to(DTYPE)
    tl.store(p_t + o_low, b_low, mask=m_low)
    tl.store(p_t + o_high, b_high, mask=m_high)
    b_low, b_high = b_low.to(tl.float32), b_high.to(tl.float32)  # the norm is that of what is stored
    b_rms = tl.rsqrt(tl.sum(tl.sum(b_low * b_low + b_high * b_high, 1), 0) / K + eps)
    b_low = b_low * b_rms * tl.load(p_weight + o_low, mask=m_low, other=0.0).to(tl.float32)
    b_high = b_high * b_rms * tl.load(p_weight + o_high, mask=m_high, other=0.0).to(tl.float32)
    b_low, b_high = b_low.to(DTYPE).to(tl.float32), b_high.to(DTYPE).to(tl.float32)
    b_scale = scales_of(b_low, b_high, BLOCKS, BY_BLOCKS, LARGEST, LEAST)
    b_out = rounded(b_low, b_high, b_scale, None, p_out.dtype.element_ty, BLOCKS, LARGEST)
    o_byte = o_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(p_out + i_t * row + o_byte, b_out, mask=o_byte < row)
    tl.store(p_scale + i_t + o_block * stride_group, b_scale, mask=o_block * BLOCK < (row if BY_BLOCKS else 1))


@quick_launch
@triton.jit(do_not_specialize=["stride_group"])
def quantize_kernel(
    p_x, p_given, p_zero, p_out, p_scale, stride_x, stride_group, K, row,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, BY_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts of BLOCKS blocks): p_out [T, row] = a row of x by its scale, or BY_BLOCKS each block by its
    own; the halves of a block byte by byte in turn. p_given: the scale of all rows, p_zero: what 0 becomes. With an
    activation a row of x holds gate and up, [T, 2 K], and what is quantized is their product [T, K], rounded."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t = tl.program_id(0).to(tl.int64)
    o_block, o_j = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, BLOCK // 2)
    o_k = o_block[:, None] * BLOCK + o_j[None, :]
    p_row = p_x + i_t * stride_x
    m_low, m_high = o_k < K, o_k + BLOCK // 2 < K
    b_low = tl.load(p_row + o_k, mask=m_low, other=0.0).to(tl.float32)
    b_high = tl.load(p_row + o_k + BLOCK // 2, mask=m_high, other=0.0).to(tl.float32)
    if ACT is not None:
        b_up = tl.load(p_row + K + o_k, mask=m_low, other=0.0).to(tl.float32)
        b_low = (activate(b_low, ACT) * b_up).to(p_x.dtype.element_ty).to(tl.float32)
        b_up = tl.load(p_row + K + o_k + BLOCK // 2, mask=m_high, other=0.0).to(tl.float32)
        b_high = (activate(b_high, ACT) * b_up).to(p_x.dtype.element_ty).to(tl.float32)
    if p_given is not None:
        b_scale = tl.load(p_given).to(tl.float32) + tl.zeros([BLOCKS], dtype=tl.float32)
    else:
        b_scale = scales_of(b_low, b_high, BLOCKS, BY_BLOCKS, LARGEST, LEAST)
    b_x = rounded(b_low, b_high, b_scale, p_zero, p_out.dtype.element_ty, BLOCKS, LARGEST)
    o_byte = o_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(p_out + i_t * row + o_byte, b_x, mask=o_byte < row)
    tl.store(p_scale + i_t + o_block * stride_group, b_scale, mask=o_block * BLOCK < (row if BY_BLOCKS else 1))


def _room(
    num_rows: int, size: int, kind: str, device: torch.device, *, by_blocks: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scales, as `quantize` leaves them."""
    num_blocks = cdiv(size, BLOCK)
    height = cdiv(num_rows, 4) * 4 if by_blocks else num_rows
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    out = torch.empty(height, num_blocks * BLOCK, dtype=dtype, device=device)
    return out, torch.empty(num_blocks if by_blocks else 1, height, dtype=torch.float32, device=device).t()


def quantize(
    x: torch.Tensor | DeferredActivation,
    kind: Literal["int8", "e4m3"],
    *,
    by_blocks: bool = False,
    given: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (bytes of `kind` [T, K rounded up to blocks], scales fp32 [T, 1]).

    by_blocks: scales [T, blocks], a column's next to each other, and T rounded up to 4, as cuBLAS wants them; what is
    in the rows behind is undefined.
    given: the scale of all rows, []; zero: what 0 becomes.
    """
    x, activation = (x.gate_up, x.activation) if isinstance(x, DeferredActivation) else (x, None)
    num_rows, size = x.shape[0], x.shape[1] // 2 if activation else x.shape[1]
    assert x.stride(1) == 1, "rows must be contiguous"
    num_blocks = cdiv(size, BLOCK)
    out, scale = _room(num_rows, size, kind, x.device, by_blocks=by_blocks)
    part = min(next_power_of_2(num_blocks), _BLOCKS) if by_blocks else next_power_of_2(num_blocks)
    if num_rows > 0:
        quantize_kernel[(num_rows, cdiv(num_blocks, part))](
            x, given, zero, out, scale, x.stride(0), scale.stride(1), size, out.shape[1],
            LARGEST=_FP8 if kind == "e4m3" else _INT8, LEAST=_LEAST_SCALE, BY_BLOCKS=by_blocks,
            BLOCK=BLOCK, BLOCKS=part, ACT=activation, num_warps=min(max(part // _WARP_BLOCKS, 1), 16),
            **early_launch(x.device),
        )  # fmt: skip
    return out, scale


def add_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, kind: NumberKind
) -> tuple[QuantizedNorm, torch.Tensor]:
    """x and residual [T, K] -> (the RMS norm of their sum by weight [K], the sum [T, K])."""
    num_rows, size = x.shape
    assert x.stride(1) == residual.stride(1) == 1, "rows must be contiguous"
    out, scale = _room(num_rows, size, kind.name, x.device, by_blocks=kind.by_blocks)
    total = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows > 0:
        part = next_power_of_2(cdiv(size, BLOCK))
        add_norm_quantize_kernel[(num_rows,)](
            x, residual, weight, total, out, scale, x.stride(0), residual.stride(0), scale.stride(1), size,
            out.shape[1], eps, LARGEST=_FP8 if kind.name == "e4m3" else _INT8, LEAST=_LEAST_SCALE,
            BY_BLOCKS=kind.by_blocks, BLOCK=BLOCK, BLOCKS=part, num_warps=min(max(part // _WARP_BLOCKS, 1), 16),
            **early_launch(x.device),
        )  # fmt: skip
    return QuantizedNorm(total, weight, eps, kind, out, scale), total
