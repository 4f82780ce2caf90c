"""Calls of the fused kernels, as models' layers make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch

from app.kernels.attention import KV_FP8, HeadNorm
from app.kernels.fused import GatedActivation, RankBoxes, triton_ops, triton_ranks
from app.kernels.gemm import triton_small_sum
from tests.kernels.target_gpu import IS_AMD, zeros


def fused(dtype: torch.dtype, hidden: int, heads: tuple[int, int, int], use_norm: bool) -> None:
    """The fused functions at the sizes of a model; heads: queries, keys, head size."""
    num_heads, num_kv_heads, head_dim = heads
    x, weight = torch.zeros(4, hidden, dtype=dtype), torch.zeros(max(hidden, head_dim), dtype=dtype)
    triton_ops.add_rms_norm(x, x, weight, 1e-6)
    for keeps_sum, bias in ((True, None), (True, weight), (False, weight)):
        triton_ops.add_layer_norm(x, x, weight, bias, 1e-5, keeps_sum=keeps_sum)
        triton_ops.layer_norm(x, weight, bias, 1e-5)
    triton_ops.add_rms_norm(x, x, weight.float(), 1e-6, weight.float())
    triton_ops.add_rms_norm(x, x, None, 1e-6, weight)
    for activation in get_args(GatedActivation):
        triton_ops.act_and_mul(torch.zeros(4, 8 * hidden, dtype=dtype), activation)
    angles = torch.zeros(4, 1, head_dim, dtype=dtype)
    cache = torch.zeros(2, 2, num_kv_heads, 16, head_dim, dtype=dtype)
    scales = torch.ones(2, num_kv_heads)
    norm = HeadNorm(weight, weight, 1e-6) if use_norm else None
    all_heads = torch.zeros(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    for kv_cache, kv_scales in ((cache, None), (cache.to(KV_FP8), scales)):
        slots = torch.zeros(4, dtype=torch.int64)
        triton_ops.rotate_and_write(all_heads, angles, angles, norm, kv_cache, slots, kv_scales)
        triton_ops.rotate_heads(all_heads, angles, angles, norm, len(all_heads[0]) // 2)


def over_ranks(num_ranks: int, hidden: int, attended: int, intermediate: int) -> None:
    """Sums over the ranks of a host, behind products and in one launch with them."""
    words, address = torch.zeros(2, num_ranks, 100 * hidden, dtype=torch.int64), torch.zeros(num_ranks).long()
    boxes, norm = RankBoxes(0, address, words, torch.zeros(2, dtype=torch.int32)), zeros(hidden)
    for rows in (1, 32, 64):
        total = zeros(rows, hidden)
        for weight in (norm, norm.float()):
            triton_ranks.sum_add_norm(boxes, total, total, weight, 1e-6)
        for size in (attended, intermediate):
            weight = zeros(hidden, size)
            triton_small_sum.linear_sum_norm(boxes, zeros(rows, size), weight, None, total, norm, 1e-6)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    found: list[Callable[[], None]] = []
    for dtype in (torch.bfloat16, torch.float32):
        found += [
            partial(fused, dtype, 1024, (16, 8, 128), use_norm=True),
            partial(fused, dtype, 4096, (32, 8, 128), use_norm=False),
        ]
    found.append(partial(fused, torch.float16, 112, (7, 1, 80), use_norm=True))
    if not IS_AMD:
        found += [partial(over_ranks, 2, 5120, 4096, 12_800), partial(over_ranks, 4, 4096, 1024, 3584)]
    return found
