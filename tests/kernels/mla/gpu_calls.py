"""Calls of latent attention's kernels, as models' layers make them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from app.kernels.attention import KV_FP8, AttentionMetadata
from app.kernels.fused import LatentRotation, triton_ops
from app.kernels.mla import triton_heads
from app.kernels.mla import triton_ops as mla_ops
from tests.kernels.stub_gpu import as_on
from tests.kernels.target_gpu import IS_AMD


def latent(dtype: torch.dtype, num_heads: int, size: int, dims: tuple[int, int], *, interleaved: bool) -> None:
    """Latents and the rotating part of queries, which lies behind the other part; dims: both parts."""
    weight, angles = torch.zeros(size, dtype=dtype), torch.zeros(4, 1, dims[1], dtype=dtype)
    rotation, slots = LatentRotation(angles, angles, interleaved, weight, 1e-6), torch.zeros(4, dtype=torch.int64)
    query = torch.zeros(4, num_heads, sum(dims), dtype=dtype)[..., dims[0] :]
    row = torch.zeros(4, num_heads * sum(dims) + size + dims[1], dtype=dtype)[:, -size - dims[1] :]
    out = torch.zeros(4, num_heads, size + dims[1], dtype=dtype)[..., size:]
    cache = torch.zeros(2, 16, size + dims[1], dtype=dtype)
    triton_ops.rotate_and_write_latent(query, row, rotation, cache, slots, None, out)
    triton_ops.rotate_and_write_latent(query, row, rotation, cache.to(KV_FP8), slots, torch.ones(1), query)
    up = torch.zeros(num_heads, dims[0] + 128, size, dtype=dtype)
    for num_tokens in (1, 30, 64):
        rows = torch.zeros(num_tokens, num_heads, size, dtype=dtype)
        triton_heads.head_products(rows[..., : dims[0]], up[:, : dims[0]], rows)
        triton_heads.head_products(rows, up[:, dims[0] :].transpose(1, 2), rows[..., :128].contiguous())


def latent_attention(dtype: torch.dtype, num_heads: int, sizes: tuple[int, int, int, int], is_fp8: bool) -> None:
    """Steps that meet latents as they are, of few rows and of many, and one that expands them; sizes: of a latent, a
    rotated key, the rest of a key, a value."""
    size, rope, nope, value = sizes
    cache, scale = torch.zeros(64, 16, size + rope, dtype=KV_FP8 if is_fp8 else dtype), torch.ones(1)
    more = {"scale": 0.1, "kv_scale": scale if is_fp8 else None}
    in_gluon = not IS_AMD and dtype != torch.float32 and sizes == (512, 64, 128, 128)
    for counts in ([1, 1, 1], [1, 30]):
        meta = AttentionMetadata(
            torch.tensor([0, *counts]).cumsum(0).int(), torch.full((len(counts),), 900, dtype=torch.int32),
            torch.zeros(len(counts), 64, dtype=torch.int32), torch.zeros(0), max(counts), 900, 0,
        )  # fmt: skip
        query = torch.zeros(sum(counts), num_heads, size + rope, dtype=dtype)
        for generation in (0, 9 if in_gluon else 0):
            with as_on(generation):
                mla_ops.OPS.prepare(meta, num_heads=num_heads, block_size=16)
                mla_ops.OPS.attend(query, cache, meta, latent_size=size, **more)
    up = torch.zeros(num_heads, nope + value, size, dtype=dtype)
    query, workspace = query[..., : nope + rope], torch.zeros(1000, num_heads, nope + value, dtype=dtype)
    for generation in (0, 9 if in_gluon else 0):
        with as_on(generation):
            mla_ops.OPS.prepare(meta, num_heads=num_heads, block_size=16)
            mla_ops.OPS.attend_expanded(query, cache, meta, up, workspace, value_dim=value, **more)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    return [
        partial(latent, torch.bfloat16, 16, 512, (128, 64), interleaved=True),
        partial(latent, torch.float32, 5, 256, (64, 32), interleaved=False),
        *(
            partial(latent_attention, torch.bfloat16, heads, (512, 64, 128, 128), is_fp8)
            for heads, is_fp8 in ((16, False), (16, True), (128, False), (128, True))
        ),
        partial(latent_attention, torch.float32, 5, (256, 32, 64, 64), False),
        partial(latent_attention, torch.bfloat16, 20, (512, 64, 192, 256), False),  # GLM-4.7-Flash
    ]
