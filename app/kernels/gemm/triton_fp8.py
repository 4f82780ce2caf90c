# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Quantizes activations to fp8 on a GPU: one launch, one reading of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.gemm.fp8 import FP8, LARGEST, LEAST_SCALE
from app.kernels.launch import next_power_of_2


@triton.jit
def quantize_rows_kernel(p_x, p_out, p_scale, stride_x, LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr,
                         K: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Grid (T,): one row."""
    i_t = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    m = o_k < K
    b_x = tl.load(p_x + i_t * stride_x + o_k, mask=m, other=0.0).to(tl.float32)
    b_scale = tl.maximum(tl.div_rn(tl.max(tl.abs(b_x), 0), LARGEST), LEAST_SCALE)
    b_x = tl.minimum(tl.maximum(tl.div_rn(b_x, b_scale), -LARGEST), LARGEST)
    tl.store(p_out + i_t * K + o_k, b_x.to(p_out.dtype.element_ty), mask=m)
    tl.store(p_scale + i_t, b_scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `fp8.quantize_rows`, in one pass."""
    num_rows, size = x.shape
    assert x.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_rows, size, dtype=FP8, device=x.device)
    scale = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    if num_rows > 0:
        padded = next_power_of_2(size)
        quantize_rows_kernel[(num_rows,)](
            x, out, scale, x.stride(0), LARGEST=LARGEST, LEAST_SCALE=LEAST_SCALE, K=size, BK=padded,
            num_warps=min(max(padded // 512, 1), 16),
        )  # fmt: skip
    return out, scale
