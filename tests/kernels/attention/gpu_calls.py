"""Calls of attention's kernels, as models' layers make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from app.kernels.attention import (
    KV_FP8,
    AttentionMetadata,
    AttentionOptions,
    HeadBias,
    HeadNorm,
    gluon_decode,
    gluon_prefill,
    gluon_texts,
    triton_encoder,
    triton_prefill,
)
from app.kernels.attention.encoder import Sight
from app.kernels.attention.triton_decode import DecodeCall, choose_tile, make_scratch
from app.kernels.attention.triton_ops import OPS
from app.kernels.attention.triton_prefill import PrefillTile
from app.kernels.attention.triton_rotated import rotated_decode, rotated_scratch, serves_rotated
from app.kernels.attention.triton_shared_splits import share_splits
from tests.kernels.target_gpu import IS_AMD


def attention(
    dtype: torch.dtype, heads: tuple[int, int, int], block_size: int, kv_dtype: torch.dtype | None = None, **masks: Any
) -> None:
    """A mixed step, steps that may be captured (one that shares splits), prefill by other tiles and kernels."""
    num_heads, num_kv_heads, head_dim = heads
    cache = torch.zeros(64, 2, num_kv_heads, block_size, head_dim, dtype=kv_dtype or dtype)
    scales = torch.ones(2, num_kv_heads) if kv_dtype is not None else None
    for is_static, cascade, counts in (
        (False, False, [1, 1, 30]), (True, False, [1] * 3), (True, True, [1] * 3), (True, True, [1] * 128),
        (True, False, [4] * 3), (True, False, [8] * 3),
    ):  # fmt: skip
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        meta = AttentionMetadata(
            starts, torch.full((len(counts),), 900, dtype=torch.int32),
            torch.zeros(len(counts), 64, dtype=torch.int32), torch.zeros(sum(counts), dtype=torch.int64), max(counts),
            900, len(counts) if is_static else 2, is_static, cascade,
        )  # fmt: skip
        query = torch.zeros(sum(counts), num_heads, head_dim, dtype=dtype)
        shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        OPS.prepare(meta, block_size=block_size, **shape)
        OPS.paged_attention(query, cache, meta, scale=0.1, kv_scales=scales, **masks)
        OPS.write_kv(query[:, :num_kv_heads], query[:, :num_kv_heads], cache, meta.slot_mapping, scales)
        options = AttentionOptions(0.1, **masks)
        lone = replace(meta, is_static=True, is_apart=True, num_decodes=1)
        if serves_rotated(query[:1], cache, lone, options):
            rows, angles = torch.zeros(1, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype), query[:1, :1]
            scratch = rotated_scratch(lone, num_heads, num_kv_heads, head_dim)
            for norm in (None, HeadNorm(query[0, 0], query[0, 0], 1e-6)):
                rotated_decode(rows, angles, angles, norm, cache, lone, scratch, options)
        if not IS_AMD and is_static and not cascade and max(counts) == 1 and scales is None and not masks:
            listed_decodes(query, cache, meta)
        if IS_AMD or dtype == torch.float32 or is_static or scales is not None or head_dim > 128:  # tiles too large
            continue
        for tile in (PrefillTile(128, 64, 8, 3), PrefillTile(128, 128, 8, 2), PrefillTile(64, 64, 4, 3)):
            triton_prefill.prefill(query, cache, meta, query, options, tile)
        if head_dim in (64, 128) and not masks:
            for window in (None, 128):
                for bias in (None, HeadBias(sinks=torch.zeros(num_heads))):
                    options = AttentionOptions(0.1, window, bias=bias)
                    gluon_prefill.prefill(query, cache, meta, query, options)


def listed_decodes(query: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata) -> None:
    """A captured step's decodes in Gluon, as of many requests."""
    tile = choose_tile(query.shape[2], query.dtype)
    scratch = make_scratch(meta, query.shape[1], cache.shape[2], query.shape[2])
    listed = scratch.splits(meta, None, tile, 1)
    call = DecodeCall(query, cache, meta, scratch, listed, False, query, AttentionOptions(0.1), tile, 1)
    with mock.patch.object(gluon_decode, "LEAST_HEADS", 1):
        if gluon_decode.serves(call):
            gluon_decode.run(call)


def encoder(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    """Attention of encoders, over heads as they lie side by side in a product."""
    num_heads, num_kv_heads, head_dim = heads
    parts = (num_heads, num_kv_heads, num_kv_heads)
    query, key, value = torch.zeros(40, sum(parts), head_dim, dtype=dtype).split(parts, 1)
    tiles, seen = torch.zeros(3, 3, dtype=torch.int32), torch.zeros(40, dtype=torch.bool)
    for window, shown in ((None, None), (65, None), (None, seen)):
        triton_encoder.launch(query, key, value, torch.empty_like(query), tiles, Sight(0.1, window, shown))
    for sight in (Sight(0.1), Sight(0.1, is_causal=True)):
        if not IS_AMD and gluon_texts.serves(query, key, value, sight):
            gluon_texts.launch(query, key, value, torch.empty_like(query), tiles, sight)


def sharing(num_requests: int) -> None:
    """The search for shared splits among many requests."""
    lens, table = torch.ones(num_requests, dtype=torch.int32), torch.zeros(num_requests, 64, dtype=torch.int32)
    meta = AttentionMetadata(lens, lens, table, lens.long(), 1, 900, num_requests, True, True)
    share_splits(meta, 4, 64, 16, 16, 2)


def gpu_calls() -> list[Callable[[], None]]:
    """All of them."""
    qwen, llama, small = (16, 8, 128), (32, 8, 128), (7, 1, 80)
    found: list[Callable[[], None]] = []
    for dtype in (torch.bfloat16, torch.float32):
        found += [partial(attention, dtype, llama, 16), partial(attention, dtype, llama, 16, KV_FP8)]
    return [
        *found,
        partial(attention, torch.float16, qwen, 128),
        partial(attention, torch.bfloat16, llama, 16, bias=HeadBias(torch.zeros(32), torch.zeros(32))),
        partial(attention, torch.bfloat16, (32, 32, 64), 16, bias=HeadBias(by_distance=torch.zeros(32, 129))),
        partial(attention, torch.bfloat16, qwen, 64, KV_FP8, sliding_window=512, soft_cap=30.0),
        partial(attention, torch.bfloat16, qwen, 64, sliding_window=512, soft_cap=30.0),
        partial(attention, torch.bfloat16, (8, 4, 256), 16, soft_cap=50.0),
        partial(attention, torch.bfloat16, (8, 4, 256), 16, KV_FP8, sliding_window=100),
        partial(attention, torch.float16, (14, 2, 64), 16),
        partial(attention, torch.float16, (14, 2, 64), 16, KV_FP8),
        partial(attention, torch.float16, small, 32),
        partial(attention, torch.float16, small, 32, KV_FP8),
        partial(attention, torch.float32, (8, 4, 8), 16),  # heads of fewer columns than a product takes
        partial(encoder, torch.bfloat16, (12, 12, 64)),
        partial(encoder, torch.bfloat16, (16, 8, 128)),
        partial(encoder, torch.float16, (16, 16, 80)),
        partial(encoder, torch.bfloat16, (16, 16, 72)),
        partial(encoder, torch.float32, (12, 12, 64)),
        partial(encoder, torch.bfloat16, (3, 1, 256)),
        *(partial(sharing, num_requests) for num_requests in (256, 512, 4096)),
    ]
