# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Activations as int8 or fp8 on a GPU, in the order in which packed weights have their bytes (stored.py)."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from app.kernels.gemm.stored import BLOCK
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

_FP8 = 448.0
_INT8 = 127.0
_LEAST_SCALE = 1e-12
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float added to it is rounded to a whole number


@quick_launch
@triton.jit
def quantize_kernel(
    p_x, p_given, p_zero, p_out, p_scale, stride_x, stride_group, K, row,
    LARGEST: tl.constexpr, LEAST: tl.constexpr, BY_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): p_out [T, row] = a row of x by its scale, or BY_BLOCKS each block by its own; the halves of a block
    byte by byte in turn. p_given: the scale of all rows, p_zero: what 0 becomes."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t = tl.program_id(0).to(tl.int64)
    o_block, o_j = tl.arange(0, BLOCKS), tl.arange(0, BLOCK // 2)
    o_k = o_block[:, None] * BLOCK + o_j[None, :]
    p_row = p_x + i_t * stride_x
    b_low = tl.load(p_row + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    b_high = tl.load(p_row + o_k + BLOCK // 2, mask=o_k + BLOCK // 2 < K, other=0.0).to(tl.float32)
    b_x = tl.interleave(b_low, b_high)
    if p_given is not None:
        b_scale = tl.load(p_given).to(tl.float32) + tl.zeros([BLOCKS], dtype=tl.float32)
    else:
        b_largest = tl.max(tl.abs(b_x), 1)
        if not BY_BLOCKS:
            b_largest = tl.max(b_largest, 0) + tl.zeros([BLOCKS], dtype=tl.float32)
        b_scale = tl.maximum(tl.div_rn(b_largest, LARGEST), LEAST)
    b_x = tl.div_rn(b_x, b_scale[:, None] + tl.zeros([BLOCKS, BLOCK], dtype=tl.float32))
    if p_out.dtype.element_ty == tl.int8:
        if p_zero is not None:
            b_x += tl.load(p_zero).to(tl.float32)
        b_x = tl.minimum(tl.maximum((b_x + _ROUND) - _ROUND, -128.0), 127.0)
    else:
        b_x = tl.minimum(tl.maximum(b_x, -LARGEST), LARGEST)
    o_byte = o_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(p_out + i_t * row + o_byte, b_x.to(p_out.dtype.element_ty), mask=o_byte < row)
    tl.store(p_scale + i_t + o_block * stride_group, b_scale, mask=o_block * BLOCK < (row if BY_BLOCKS else 1))


def quantize(
    x: torch.Tensor,
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
    num_rows, size = x.shape
    assert x.stride(1) == 1, "rows must be contiguous"
    num_blocks = cdiv(size, BLOCK)
    height = cdiv(num_rows, 4) * 4 if by_blocks else num_rows
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    out = torch.empty(height, num_blocks * BLOCK, dtype=dtype, device=x.device)
    scale = torch.empty(num_blocks if by_blocks else 1, height, dtype=torch.float32, device=x.device).t()
    padded = next_power_of_2(num_blocks)
    if num_rows > 0:
        quantize_kernel[(num_rows,)](
            x, given, zero, out, scale, x.stride(0), height, size, out.shape[1],
            LARGEST=_FP8 if kind == "e4m3" else _INT8, LEAST=_LEAST_SCALE, BY_BLOCKS=by_blocks,
            BLOCK=BLOCK, BLOCKS=padded, num_warps=min(max(padded // 8, 1), 16), **early_launch(x.device),
        )  # fmt: skip
    return out, scale
