"""Attention on a GPU that is the same to the bit for a token, however its step is made up; the interpreter shows that
it is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.kernels.attention import AttentionMetadata, triton_fixed
from app.kernels.attention.triton_fixed import OPS, RowTile
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch

# A part of the requests decodes; contexts of several splits, windows that end in one.
LENS = [(1, 1), (1, 17), (1, 70), (3, 3), (33, 33), (7, 70)]
SHAPES = [(6, 2, 20, 32), (7, 1, 48, 16)]  # query heads, KV heads, head size, block size
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def attend(
    batch: Batch, query: torch.Tensor, meta: AttentionMetadata, window: int | None, soft_cap: float | None
) -> torch.Tensor:
    _, _, num_kv_heads, block_size, head_dim = batch.kv_cache.shape
    sizes = {"num_kv_heads": num_kv_heads, "block_size": block_size, "head_dim": head_dim}
    OPS.prepare(meta, num_heads=query.shape[1], **sizes)
    return OPS.paged_attention(query, batch.kv_cache, meta, scale=0.2, sliding_window=window, soft_cap=soft_cap)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (40, None), (None, 3.0)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("programs", [1, 264])
def test_against_float64(
    shape: tuple[int, int, int, int],
    window: int | None,
    soft_cap: float | None,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`programs`: whether several share a request's splits."""
    monkeypatch.setattr(triton_fixed, "SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_fixed, "KEYS", 16)
    monkeypatch.setattr(triton_fixed, "FEW_ROWS", RowTile(16, 4))
    monkeypatch.setattr(triton_fixed, "MANY_ROWS", RowTile(32, 4))
    monkeypatch.setattr(triton_fixed, "_FEW_PROGRAMS", programs)
    num_heads, num_kv_heads, head_dim, block_size = shape
    batch = make_batch(
        LENS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
    )  # fmt: skip
    found = attend(batch, batch.query, batch.meta, window, soft_cap)
    truth = contiguous_attention(batch, scale=0.2, sliding_window=window, soft_cap=soft_cap)
    torch.testing.assert_close(found.double(), truth, rtol=3e-5, atol=3e-5)


GPU_SHAPES = [(32, 8, 128, 16), (16, 8, 128, 16), (4, 2, 64, 32), (8, 1, 80, 16), (6, 2, 32, 16)]
GPU_LENS = [(1, 1), (1, 500), (1, 513), (1, 3000), (4, 1030), (300, 300), (77, 1500), (1600, 1600)]


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, None), (700, None), (None, 5.0), (700, 5.0)])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_a_token_alone_has_the_bits_of_one_in_a_prompt(
    shape: tuple[int, int, int, int], window: int | None, soft_cap: float | None
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    batch = make_batch(GPU_LENS, dtype=torch.bfloat16, device="cuda", **sizes)
    whole = attend(batch, batch.query, batch.meta, window, soft_cap)
    truth = contiguous_attention(batch, scale=0.2, sliding_window=window, soft_cap=soft_cap)
    torch.testing.assert_close(whole.double(), truth, rtol=3e-2, atol=3e-2)
    starts = batch.meta.query_start_loc.tolist()
    for request, (count, length) in enumerate(GPU_LENS):
        for size in (1, 3, 64, 500):
            for first in sorted({*range(0, count, max(size, count // 5)), count - 1}):
                last = min(first + size, count)
                part = replace(
                    batch.meta,
                    query_start_loc=torch.tensor([0, last - first], dtype=torch.int32, device="cuda"),
                    seq_lens=torch.tensor([length - count + last], dtype=torch.int32, device="cuda"),
                    block_table=batch.meta.block_table[request : request + 1],
                    slot_mapping=batch.meta.slot_mapping[: last - first],
                    max_query_len=last - first,
                    max_seq_len=length - count + last,
                    num_decodes=int(last - first == 1),
                    plan=None,
                )
                rows = slice(starts[request] + first, starts[request] + last)
                found = attend(batch, batch.query[rows], part, window, soft_cap)
                where = f"request {request}, tokens {first} to {last}"
                assert torch.equal(found.view(torch.int16), whole[rows].view(torch.int16)), where
