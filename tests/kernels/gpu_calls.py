"""Calls of layers whose kernels are of several families."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from app.kernels.attention import AttentionMetadata, EncodedStep, triton_fixed
from app.kernels.attention.triton_encoded import encoded_kernel_for
from app.kernels.fused import triton_ops
from app.kernels.gemm import triton_fixed as fixed_products
from app.kernels.gemm import triton_small
from app.kernels.sampling import triton_log_softmax
from tests.kernels.target_gpu import IS_AMD, zeros


def exact(
    sizes: tuple[int, int, int],
    heads: tuple[int, int, int],
    window: int | None,
    soft_cap: float | None = None,
) -> None:
    """A layer of rows that depend on no others, at every number of rows that has a tile of its own; sizes: of the
    hidden state, of gate and up, of the vocabulary."""
    (hidden, intermediate, vocab), (num_heads, num_kv_heads, head_dim) = sizes, heads
    for count in (1, 30, 60, 100, 256, 300, 8192):
        x = torch.empty(count, hidden, dtype=torch.bfloat16)
        ops = fixed_products.OPS
        ops.linear(x, torch.empty(num_heads * head_dim, hidden, dtype=torch.bfloat16), None)
        gated = ops.gated_linear(x, torch.empty(2 * intermediate, hidden, dtype=torch.bfloat16), None, "silu")
        ops.linear_add_norm(gated, torch.empty(hidden, intermediate, dtype=torch.bfloat16), x[0], x, x[0], 1e-6, True)
    triton_ops.OPS.rms_norm(x, x[0], 1e-6)
    triton_log_softmax.log_softmax(torch.empty(2, vocab))
    cache = torch.zeros(64, 2, num_kv_heads, 16, head_dim, dtype=torch.bfloat16)
    for counts in ([1, 1, 30], [1] * 3, [4] * 2, [1] * 300):
        lens, starts = torch.full((len(counts),), 900, dtype=torch.int32), torch.tensor([0, *counts]).cumsum(0).int()
        table, slots = torch.zeros(len(counts), 64, dtype=torch.int32), torch.zeros(sum(counts), dtype=torch.int64)
        meta = AttentionMetadata(starts, lens, table, slots, max(counts), 900, counts.count(1))
        shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        triton_fixed.OPS.prepare(meta, block_size=16, **shape)
        query = zeros(sum(counts), num_heads, head_dim)
        triton_fixed.OPS.paged_attention(query, cache, meta, scale=0.1, sliding_window=window, soft_cap=soft_cap)


def listener(dtype: torch.dtype, heads: int, head_dim: int, intermediate: int) -> None:
    """A decoder's layer of Whisper's, of few streams."""
    hidden, zeros = heads * head_dim, partial(torch.zeros, dtype=dtype)
    for rows in (1, 2, 4, 32):
        x, bias = zeros(rows, hidden), zeros(hidden)
        triton_small.linear(x, zeros(3 * hidden, hidden), zeros(3 * hidden))
        triton_small.linear_add(x, zeros(hidden, hidden), bias, x)
        triton_small.activated_linear(x, zeros(intermediate, hidden), zeros(intermediate), "gelu")
        triton_small.linear_add(zeros(rows, intermediate), zeros(hidden, intermediate), bias, x)
        triton_small.linear(x, zeros(hidden - 1, hidden), None)
        slots = torch.zeros(rows, dtype=torch.int32)
        kernel = encoded_kernel_for(head_dim, 1500)
        assert kernel is not None
        kernel(x.view(rows, heads, head_dim), zeros(94, 2, heads, 16, head_dim), EncodedStep(slots, slots, 1500), 0.1)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    found: list[Callable[[], None]] = [
        partial(listener, torch.bfloat16, 20, 64, 5120),
        partial(listener, torch.float16, 8, 128, 4096),
    ]
    if not IS_AMD:
        found += [
            partial(exact, (4096, 14336, 128_256), (32, 8, 128), None),
            partial(exact, (1000, 3000, 331), (6, 2, 80), 512, 50.0),
        ]
    return found
