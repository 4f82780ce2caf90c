# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Keys and values on their way into a quantized KV cache, and the queries that meet them there."""

from __future__ import annotations

import triton
import triton.language as tl

from app.kernels.attention import KV_FP8_MAX

_MAX = tl.constexpr(KV_FP8_MAX)
_FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def quantize(b_x, b_scale, dtype: tl.constexpr):
    """The same as `reference.quantize`, bit for bit: b_x [N, BD] of any type, b_scale fp32 [N, 1]."""
    b_y = tl.div_rn(b_x.to(tl.float32), tl.broadcast_to(b_scale, b_x.shape))
    return tl.clamp(b_y, -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def query_to_fp8_keys(b_q):
    """b_q in the type that stored tiles are converted to for the products: bf16 becomes fp16, others stay.

    A GPU converts two e4m3 to fp16 by one instruction; to bf16 it takes three, two of them at an eighth of the rate,
    which alone would cost more time than reading the tile. Nothing is lost: e4m3 fits into fp16, weights of the softmax
    lie between 0 and 1 and get three bits more, and a query beyond fp16's range has scores beyond all meaning.
    """
    if b_q.dtype == tl.bfloat16:
        b_q = tl.clamp(b_q.to(tl.float32), -_FP16_MAX, _FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return b_q
