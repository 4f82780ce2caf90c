# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The decode kernel's step over a tile of a quantized cache: `attend_tile` for values that are pairs of bytes.

Tensor cores want values by columns, and shared memory turns 16 bits at once, not 8: a tile of e4m3 would be read byte
by byte. So two neighbouring dimensions travel as one 16-bit number and come apart in registers, into values of even
dimensions and of odd ones; the result is accumulated in two halves, which `joined` puts together at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.attention.triton_tile import score_tile, tile_offsets

# NVIDIA's assembly. The interpreter and AMD's GPUs run instead what a compiler turns into more instructions.
_BY_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)
# Two pairs of bytes in a register: the low bytes and the high bytes are converted two at a time.
_UNPACK = tl.constexpr("""{
    .reg .b32 even, odd;
    .reg .b16 left, right, unused;
    prmt.b32 even, $2, $2, 0x0020;
    prmt.b32 odd, $2, $2, 0x0031;
    mov.b32 {left, unused}, even;
    mov.b32 {right, unused}, odd;
    cvt.rn.f16x2.e4m3x2 $0, left;
    cvt.rn.f16x2.e4m3x2 $1, right;
}""")


@triton.jit
def unpack_pairs(b_pairs, dtype: tl.constexpr):
    """uint16 [N, M], two e4m3 each -> the low ones and the high ones, both [N, M] of `dtype`."""
    if _BY_ASSEMBLY:
        b_low, b_high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r", [b_pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        b_low = (b_pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        b_high = (b_pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return b_low.to(dtype), b_high.to(dtype)


@triton.jit
def attend_fp8_tile(
    b_q,  # [BM, BD], not bf16 (see query_to_fp8_keys)
    b_even,  # fp32 [BM, BD / 2], weighted values of even dimensions
    b_odd,  # the odd ones
    b_sum, b_max, p_head, p_table, i_n, lo, hi, o_pos, scale, soft_cap, window, b_slope, p_bias, num_bias,
    stride_block, stride_value, stride_slot,
    D: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    USE_WINDOW: tl.constexpr, USE_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys and values of positions [i_n, i_n + BN) into (b_even, b_odd, b_sum, b_max) and return them."""
    o_n = i_n + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_pair = tl.arange(0, BD // 2)
    m_n = (o_n >= lo) & (o_n < hi)
    p_k = p_head + tile_offsets(p_table, i_n, o_n, m_n, stride_block, stride_slot, S, BN)[:, None]
    b_k = tl.load(p_k + o_d[None, :], mask=m_n[:, None] & (o_d[None, :] < D), other=0.0)
    b_p, b_scale, b_sum, b_max = score_tile(
        b_q, b_sum, b_max, b_k, o_n, m_n, o_pos, scale, soft_cap, window, b_slope, p_bias, num_bias,
        True, USE_WINDOW, USE_CAP, PRECISION,
    )  # fmt: skip
    p_v = (p_k + stride_value).to(tl.pointer_type(tl.uint16)) + o_pair[None, :]
    b_v = tl.load(p_v, mask=m_n[:, None] & (o_pair[None, :] < D // 2), other=0)
    b_p = b_p.to(b_q.dtype)
    b_low, b_high = unpack_pairs(b_v, b_q.dtype)
    b_even = tl.dot(b_p, b_low, b_even * b_scale[:, None], input_precision=PRECISION)
    b_odd = tl.dot(b_p, b_high, b_odd * b_scale[:, None], input_precision=PRECISION)
    return b_even, b_odd, b_sum, b_max


@triton.jit
def joined(b_even, b_odd, BM: tl.constexpr, BD: tl.constexpr):
    """Two halves [BM, BD / 2] as [BM, BD], dimensions in their order."""
    return tl.reshape(tl.join(b_even, b_odd), [BM, BD])
