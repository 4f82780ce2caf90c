"""Attention on a CPU that is the same to the bit for a token, however its step is made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from app.kernels.attention import AttentionMetadata, fixed_tiles
from app.kernels.attention.fixed_tiles import OPS
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch

LENS = [(1, 1), (1, 16), (1, 17), (1, 300), (5, 5), (33, 33), (7, 270), (150, 150)]
SHAPES = [(2, 2, 32, 16), (6, 2, 20, 8), (7, 1, 48, 5), (20, 1, 16, 16)]  # query heads, KV heads, head size, block size


def attend(batch: Batch, query: torch.Tensor, meta: AttentionMetadata, **options: Any) -> torch.Tensor:
    _, _, num_kv_heads, block_size, head_dim = batch.kv_cache.shape
    sizes = {"num_kv_heads": num_kv_heads, "block_size": block_size, "head_dim": head_dim}
    OPS.prepare(meta, num_heads=query.shape[1], **sizes)
    return OPS.paged_attention(query, batch.kv_cache, meta, scale=0.2, **options)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, None), (140, 3.0)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    window: int | None,
    soft_cap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fixed_tiles, "_GROUP_SCORES", 1 << 15)  # several groups of tiles
    num_heads, num_kv_heads, head_dim, block_size = shape
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    batch = make_batch(LENS, dtype=dtype, **sizes)
    found = attend(batch, batch.query, batch.meta, sliding_window=window, soft_cap=soft_cap)
    truth = contiguous_attention(batch, scale=0.2, sliding_window=window, soft_cap=soft_cap)
    assert found.dtype == dtype
    tolerance = 3e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, None), (140, 3.0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_alone_has_the_bits_of_one_in_a_prompt(
    shape: tuple[int, int, int, int], window: int | None, soft_cap: float | None
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    batch = make_batch(LENS, **sizes)
    whole = attend(batch, batch.query, batch.meta, sliding_window=window, soft_cap=soft_cap)
    starts = batch.meta.query_start_loc.tolist()
    for request, (count, length) in enumerate(LENS):
        for size in (1, 6, 64):
            for first in range(0, count, size):
                last = min(first + size, count)
                part = replace(
                    batch.meta,
                    query_start_loc=torch.tensor([0, last - first], dtype=torch.int32),
                    seq_lens=torch.tensor([length - count + last], dtype=torch.int32),
                    block_table=batch.meta.block_table[request : request + 1],
                    plan=None,
                )
                rows = slice(starts[request] + first, starts[request] + last)
                found = attend(batch, batch.query[rows], part, sliding_window=window, soft_cap=soft_cap)
                assert torch.equal(found.view(torch.int32), whole[rows].view(torch.int32))
