# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of few rows with a matrix for each head: absorbed queries, and values of what they found.

Such a product is bound by reading the matrices once, and in a small step by being launched: here early, as the kernels
beside it (app/kernels/launch.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.mla.heads import head_products as plain_head_products
from app.kernels.quick_launch import quick_launch

MOST_ROWS = 64  # beyond, cuBLAS is as fast
_DTYPES = (torch.bfloat16, torch.float16)
_PROGRAMS = 128  # about one for each multiprocessor
_DEPTH = 128


@quick_launch
@triton.jit(do_not_specialize=["T"])
def head_products_kernel(
    p_x, p_weight, p_out, T, stride_x_token, stride_x_head, stride_w_head, stride_w, stride_out_token, stride_out_head,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, K_LAST: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, H): a head's rows [T, K] times its matrix, [N, K] in memory (K_LAST) or [K, N]."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_h = tl.program_id(1).to(tl.int64)
    o_m, o_n = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    m_m, m_n = o_m[:, None] < T, o_n < N
    p_rows = p_x + i_h * stride_x_head + o_m[:, None] * stride_x_token
    p_w = p_weight + i_h * stride_w_head
    b_acc = tl.zeros([BM, BN], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_x = tl.load(p_rows + o_k[None, :], mask=m_m & m_k[None, :], other=0.0)
        if K_LAST:
            p_tile = p_w + o_n[:, None] * stride_w + o_k[None, :]
            b_w = tl.trans(tl.load(p_tile, mask=m_n[:, None] & m_k[None, :], other=0.0))
        else:
            p_tile = p_w + o_k[:, None] * stride_w + o_n[None, :]
            b_w = tl.load(p_tile, mask=m_k[:, None] & m_n[None, :], other=0.0)
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision=PRECISION)
    p_o = p_out + i_h * stride_out_head + o_m[:, None].to(tl.int64) * stride_out_token + o_n[None, :]
    tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=m_m & m_n[None, :])


def head_products(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The same as `heads.head_products`."""
    if len(x) > MOST_ROWS or x.dtype not in _DTYPES:
        plain_head_products(x, weight, out)
        return
    num_tokens, num_heads, depth = x.shape
    columns = weight.shape[2]
    is_k_last = weight.stride(1) == 1
    assert x.stride(2) == out.stride(2) == weight.stride(1 if is_k_last else 2) == 1, "rows must be contiguous"
    if num_tokens == 0:
        return
    tile = min(128, max(16, next_power_of_2(cdiv(num_heads * columns, _PROGRAMS))))
    head_products_kernel[(cdiv(columns, tile), num_heads)](
        x, weight, out, num_tokens, *x.stride()[:2], weight.stride(0), weight.stride(2 if is_k_last else 1),
        *out.stride()[:2],
        K=depth, N=columns, BM=max(16, next_power_of_2(num_tokens)), BN=tile,
        BK=min(_DEPTH, max(16, next_power_of_2(depth))), K_LAST=is_k_last, PRECISION="ieee", num_warps=4, num_stages=3,
        **early_launch(x.device),
    )  # fmt: skip
