"""Latent attention on a CPU: absorbed and expanded against attention over whole heads in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from app.backends import ATTENTION_BACKENDS
from app.errors import ConfigError
from app.kernels.attention import KV_FP8, AttentionMetadata
from app.kernels.attention import reference as attention
from app.kernels.mla import chunk_tokens, mla_ops
from app.kernels.mla.reference import OPS, naive_latent_attention, prepare

SIZE, ROPE, NOPE, VALUE, BLOCK = 40, 8, 12, 20, 16
SCALE = 0.21


def step(counts: list[int], contexts: list[int]) -> AttentionMetadata:
    """Blocks in a scrambled order; what a table has beyond a request's blocks are others'."""
    lengths = torch.tensor(counts) + torch.tensor(contexts)
    width = -(-int(lengths.max()) // BLOCK)
    table = torch.randperm(len(counts) * width, generator=torch.Generator().manual_seed(3)).view(len(counts), width)
    starts = F.pad(torch.tensor(counts).cumsum(0), (1, 0))
    return AttentionMetadata(
        starts.int(), lengths.int(), table.int(), torch.zeros(0), max(counts), int(lengths.max()),
        sum(count == 1 for count in counts),
    )  # fmt: skip


def judged(
    query: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata, up: torch.Tensor, kv_scale: float
) -> torch.Tensor:
    """PyTorch's own attention over whole heads, float64."""
    out = []
    for request, length in enumerate(meta.seq_lens.tolist()):
        rows = slice(*meta.query_start_loc[request : request + 2].tolist())
        positions = torch.arange(length)
        latents = cache.double()[meta.block_table[request].long()[positions // BLOCK], positions % BLOCK] * kv_scale
        both = (latents[:, :SIZE] @ up.double().flatten(0, 1).t()).unflatten(1, up.shape[:2])
        key = torch.cat((both[..., :NOPE], latents[:, None, SIZE:].expand(-1, len(up), -1)), -1)
        mask = positions <= positions[length - (rows.stop - rows.start) :][:, None]
        heads = (x.transpose(0, 1) for x in (query[rows].double(), key, both[..., NOPE:]))
        out.append(F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=SCALE).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_scale", [None, 0.3])
@pytest.mark.parametrize(
    ("counts", "contexts"),
    [([1, 1, 1], [0, 15, 700]), ([1, 5, 300], [31, 32, 17]), ([16], [0]), ([2, 270], [1023, 0])],
)
def test_both_ways_equal_attention_over_heads(
    counts: list[int], contexts: list[int], kv_scale: float | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    meta, num_heads = step(counts, contexts), 3
    cache = torch.randn(int(meta.block_table.max()) + 1, BLOCK, SIZE + ROPE, generator=generator).to(dtype)
    cache = cache if kv_scale is None else cache.to(KV_FP8)
    up = (torch.randn(num_heads, NOPE + VALUE, SIZE, generator=generator) / 4).to(dtype)
    query = torch.randn(sum(counts), num_heads, NOPE + ROPE, generator=generator).to(dtype)
    truth = judged(query, cache, meta, up, kv_scale or 1.0)
    more = {} if kv_scale is None else {"kv_scale": torch.tensor([kv_scale])}
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]

    def check(found: torch.Tensor) -> None:
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance)

    check(naive_latent_attention(query, cache, meta, up, scale=SCALE, value_dim=VALUE, **more))
    prepare(meta, num_heads=num_heads, block_size=BLOCK)
    latent_query = torch.einsum("thd,hdr->thr", query[..., :NOPE], up[:, :NOPE])
    absorbed = torch.cat((latent_query, query[..., NOPE:]), -1)
    found = OPS.attend(absorbed, cache, meta, scale=SCALE, latent_size=SIZE, **more)
    check(torch.einsum("thr,hdr->thd", found, up[:, NOPE:]))
    for tokens in (7, 64, 2000):  # in parts that end within blocks, at their ends, in one
        workspace = torch.full((tokens, *up.shape[:2]), torch.nan, dtype=dtype)
        check(OPS.attend_expanded(query, cache, meta, up, workspace, scale=SCALE, value_dim=VALUE, **more))


def test_a_backend_without_it_is_refused_by_name() -> None:
    assert mla_ops(attention.OPS) is OPS
    with pytest.raises(ConfigError, match="attention_backend=flex: it does not serve latent attention"):
        mla_ops(ATTENTION_BACKENDS.load("flex"))
    named = replace(attention.OPS, name="mine", latent="app.kernels.mla.reference:prepare")
    with pytest.raises(ConfigError, match=r"attention_backend=mine: its latent='app.*prepare' is no MLAOps") as raised:
        mla_ops(named)
    assert raised.value.param == "attention_backend"


def test_the_workspace_has_a_fixed_size() -> None:
    assert chunk_tokens(16, 256, 2, 1 << 20) * 16 * 256 * 2 == 128 << 20
    assert chunk_tokens(128, 256, 2, 1 << 20) * 128 * 256 * 2 == 128 << 20
    assert chunk_tokens(16, 256, 2, 2048) == 2048
