"""Attention over keys and values in int8: float64 over what is stored (tight), and over what was meant."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from app.errors import ConfigError
from app.kernels.attention import KV_INT8, SCALE_WIDTH, HeadBias, flex, reference, triton_ops
from app.kernels.attention.int8_cache import pack, unpack
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch

MIXED = [(1, 1), (1, 64), (1, 33), (1, 150), (5, 5), (19, 19), (3, 50), (1, 40)]


def left_of(x: torch.Tensor) -> torch.Tensor:
    """float64 [..., D] after quantization, rounded in NumPy."""
    numbers = x.float().numpy()
    scale = np.abs(numbers).max(-1, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.round(numbers / scale).astype(np.float64) * scale)


def quantized(batch: Batch) -> Batch:
    """The batch as it was written; slots that nobody owns have a scale of NaN."""
    keys, values = ([left_of(x) for x in part] for part in (batch.keys, batch.values))
    cache = pack(batch.kv_cache)
    assert cache.dtype == KV_INT8
    assert cache.shape[-1] == batch.kv_cache.shape[-1] + SCALE_WIDTH
    return dataclasses.replace(batch, kv_cache=cache, keys=keys, values=values)


def attended(batch: Batch, head_dim: int, **options: object) -> torch.Tensor:
    shape = {"num_heads": batch.query.shape[1], "num_kv_heads": batch.kv_cache.shape[2], "head_dim": head_dim}
    reference.OPS.prepare(batch.meta, block_size=batch.kv_cache.shape[3], **shape)
    return reference.OPS.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=head_dim**-0.5, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "options"),
    [
        (4, 2, 32, 16, {}),
        (7, 1, 80, 32, {}),
        (6, 2, 30, 16, {"sliding_window": 20}),
        (4, 4, 64, 16, {"soft_cap": 5.0}),
        (4, 2, 32, 16, {"bias": HeadBias(sinks=torch.linspace(-1, 2, 4))}),
    ],
)
def test_equals_float64_over_what_is_stored(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, options: dict[str, object], dtype: torch.dtype
) -> None:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    plain = make_batch(MIXED, dtype=dtype, **sizes)
    batch = quantized(plain)
    out = attended(batch, head_dim, **options)
    assert out.dtype == dtype
    stored, meant = (contiguous_attention(b, scale=head_dim**-0.5, **options) for b in (batch, plain))
    assert float((out.double() - stored).norm() / stored.norm()) < (2e-6 if dtype == torch.float32 else 8e-3)
    assert float((out.double() - meant).norm() / meant.norm()) < 0.015


def test_what_is_written_is_read() -> None:
    cache = torch.zeros(4, 2, 3, 16, 20 + SCALE_WIDTH, dtype=KV_INT8)
    key, value = torch.randn(5, 3, 20), 1e4 * torch.randn(5, 3, 20)
    key[1], value[2, 0, 3] = 0.0, float("nan")
    slots = torch.tensor([17, 2, 63, -1, 0])
    reference.write_kv(key, value, cache, slots)
    found = unpack(cache, torch.float32)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for kind, x in enumerate((key, value)):
            stored = found[slot // 16, kind, :, slot % 16]
            step = x[token].abs().amax(-1, keepdim=True) / 127
            assert torch.equal(stored.isnan().any(-1), x[token].isnan().any(-1))
            assert bool(((stored - x[token]).abs() <= 0.51 * step).logical_or(x[token].isnan().any(-1)[:, None]).all())
    assert int((cache.view(-1, 24)[:, :20] != 0).any(1).sum()) <= 4 * 2 * 3, "nothing else was written"


def test_backends_without_it_refuse_it_by_name() -> None:
    for ops in (triton_ops.OPS, flex.OPS):
        with pytest.raises(ConfigError, match="a KV cache in int8"):
            ops.require(kv_int8=True)
