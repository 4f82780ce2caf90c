# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Logprobs on a GPU, each row by one program that knows no other: PyTorch's own reads a row from the first address that
suits a vector, which is not the same place of all rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.quick_launch import quick_launch

_TILE = 4096  # logits at a time


@quick_launch
@triton.jit
def log_softmax_kernel(p_logits, p_out, stride_logits, V, BN: tl.constexpr):
    """Grid (N,): the row's maximum, then the sum of its exponentials, then its logprobs."""
    i_n = tl.program_id(0).to(tl.int64)
    p_row, o = p_logits + i_n * stride_logits, tl.arange(0, BN)
    b_best = tl.full([BN], float("-inf"), dtype=tl.float32)
    for i in range(0, V, BN):
        b_best = tl.maximum(b_best, tl.load(p_row + i + o, mask=i + o < V, other=float("-inf")))
    b_max = tl.max(b_best, 0)
    b_sum = tl.zeros([BN], dtype=tl.float32)
    for i in range(0, V, BN):
        b_sum += tl.exp(tl.load(p_row + i + o, mask=i + o < V, other=float("-inf")) - b_max)
    b_log = tl.log(tl.sum(b_sum, 0))
    for i in range(0, V, BN):
        b_x = tl.load(p_row + i + o, mask=i + o < V, other=0.0)
        tl.store(p_out + i_n * V + i + o, b_x - b_max - b_log, mask=i + o < V)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """The same as `reference.log_softmax`: fp32 [N, V] -> [N, V]."""
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if len(logits) > 0:
        log_softmax_kernel[(len(logits),)](logits, out, logits.stride(0), logits.shape[1], BN=_TILE, num_warps=8)
    return out
