# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Keys and values on their way into a quantized KV cache."""

from __future__ import annotations

import triton
import triton.language as tl

from app.kernels.attention import KV_FP8_MAX

_MAX = tl.constexpr(KV_FP8_MAX)


@triton.jit
def quantize(b_x, b_scale, dtype: tl.constexpr):
    """As `reference.quantize`, bit for bit: b_x [N, BD] of any type, b_scale fp32 [N, 1]."""
    b_y = tl.div_rn(b_x.to(tl.float32), tl.broadcast_to(b_scale, b_x.shape))
    return tl.clamp(b_y, -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL).to(dtype)
