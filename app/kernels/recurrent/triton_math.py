# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Functions that kernels of recurrent layers share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)) of fp32 numbers, also where exp(x) is far below 1."""
    b_e = tl.exp(tl.minimum(b_x, 20.0))
    b_small = b_e * (1.0 - b_e * (0.5 - b_e * 0.3333333333))
    return tl.where(b_x > 20.0, b_x, tl.where(b_e < 0.01, b_small, tl.log(1.0 + b_e)))


@triton.jit
def unit_rows(b_x, EPS: tl.constexpr):
    """Rows of length 1, fp32 [L, D]."""
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) + EPS)[:, None]
