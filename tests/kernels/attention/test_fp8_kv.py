"""Attention over a quantized cache: float64 over what is stored (tight), and over what was meant (what e4m3 costs)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from app.kernels.attention import (
    KV_FP8,
    AttentionOps,
    AttentionOptions,
    gluon_prefill,
    reference,
    triton_ops,
    triton_splits,
)
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch
from tests.kernels.gemm.test_fp8 import nearest_e4m3

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
OPS = [pytest.param(reference.OPS, id="torch"), pytest.param(triton_ops.OPS, id="triton")]
FP32, FP16 = torch.float32, torch.float16
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]  # the interpreter computes wrongly in it
MIXED = [(1, 1), (1, 64), (1, 33), (1, 150), (5, 5), (19, 19), (3, 50), (1, 40)]
STORED = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}  # relative error against what is stored
MEANT = 0.06  # against unquantized keys and values: a rounding to 4 bits costs 2.6 % of each number
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")


def scales_of(num_kv_heads: int, device: str = DEVICE) -> torch.Tensor:
    """Another scale for each head, of keys and of values; all away from 1 and from powers of 2."""
    return (0.3 + 0.17 * torch.arange(2.0 * num_kv_heads)).view(2, num_kv_heads).to(device)


def left_of(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [..., Hkv, D] after quantization, rounded in NumPy."""
    scaled = (x.float() / scales[:, None]).double().cpu().numpy()
    return torch.from_numpy(nearest_e4m3(scaled)).to(x.device) * scales[:, None].double()


def quantized(batch: Batch, scales: torch.Tensor) -> Batch:
    """The batch over a quantized cache; slots that nobody owns hold e4m3's NaN."""
    cache = (batch.kv_cache.float() / scales[:, :, None, None]).to(KV_FP8)
    assert cache.isnan().any()
    keys = [left_of(key, scales[0]) for key in batch.keys]
    values = [left_of(value, scales[1]) for value in batch.values]
    return dataclasses.replace(batch, kv_cache=cache, keys=keys, values=values)


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.double() - truth).norm() / truth.norm())


def check(ops: AttentionOps, plain: Batch, **options: float | int | None) -> None:
    num_kv_heads, block_size, head_dim = plain.kv_cache.shape[2:]
    scales, scale = scales_of(num_kv_heads, str(plain.query.device)), head_dim**-0.5
    batch = quantized(plain, scales)
    shape = {"num_heads": batch.query.shape[1], "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    ops.prepare(batch.meta, block_size=block_size, **shape)
    out = ops.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=scale, kv_scales=scales, **options)
    assert out.dtype == batch.query.dtype
    assert error(out, contiguous_attention(batch, scale=scale, **options)) < STORED[out.dtype]
    assert error(out, contiguous_attention(plain, scale=scale, **options)) < MEANT
    naive = reference.naive_paged_attention(
        batch.query, batch.kv_cache, batch.meta, scale=scale, kv_scales=scales, **options
    )
    assert error(out, naive.double()) < STORED[out.dtype]


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads", "head_dim", "block_size", "options"),
    [
        (FP16, 4, 2, 32, 16, {}),
        (FP32, 7, 1, 80, 32, {}),
        (FP16, 4, 4, 128, 64, {"sliding_window": 20}),
        (FP16, 3, 1, 80, 128, {"soft_cap": 10.0}),
        (FP32, 6, 3, 64, 16, {"sliding_window": 33, "soft_cap": 10.0}),
    ],
)
def test_attention(
    ops: AttentionOps, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
    options: dict[str, float],
) -> None:  # fmt: skip
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    check(ops, make_batch(MIXED, dtype=dtype, device=DEVICE, **shape), **options)


@pytest.mark.parametrize("is_static", [False, True])
def test_splits_merge(monkeypatch: pytest.MonkeyPatch, is_static: bool) -> None:
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_splits, "MAX_SPLITS", 8)
    batch = make_batch([(1, 1), (1, 33), (1, 290), (1, 256)], device=DEVICE)
    meta = dataclasses.replace(batch.meta, is_static=is_static, max_seq_len=512)
    check(triton_ops.OPS, dataclasses.replace(batch, meta=meta))


def test_gluon_refuses_a_quantized_cache() -> None:
    plain = make_batch([(70, 70)], num_heads=2, num_kv_heads=1, head_dim=64, dtype=torch.float16, device=DEVICE)
    options = AttentionOptions(1.0)
    assert gluon_prefill.serves(plain.query, plain.kv_cache, options)
    assert not gluon_prefill.serves(plain.query, quantized(plain, scales_of(1)).kv_cache, options)


@pytest.mark.usefixtures("rounding_e4m3")
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 32), (3, 80)])
def test_write_kv_rounds_clamps_and_leaves_other_slots(
    ops: AttentionOps, dtype: torch.dtype, num_kv_heads: int, head_dim: int
) -> None:
    scales = scales_of(num_kv_heads)
    qkv = torch.randn(6, 3 * num_kv_heads, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    key, value = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads :]
    key *= torch.logspace(-4, 4, 6, device=DEVICE)[:, None, None].to(dtype)  # from subnormal to far beyond 448
    key[5, 0, 0], value[5, 0, 1] = float("nan"), float("inf")
    slots = torch.tensor([5, -1, 0, 16, 63, 31], device=DEVICE)
    cache = torch.full((4, 2, num_kv_heads, 16, head_dim), 7.0, device=DEVICE).to(KV_FP8)
    ops.write_kv(key, value, cache, slots, scales)
    expected = torch.full(cache.shape, 7.0, dtype=torch.float64, device=DEVICE)
    for token, slot in enumerate(slots.tolist()):
        for half, x in enumerate((key, value)):
            if slot >= 0:
                numbers = left_of(x[token], scales[half]) / scales[half][:, None].double()
                expected[slot // 16, half, :, slot % 16] = torch.where(x[token].isnan(), float("nan"), numbers)
    torch.testing.assert_close(cache.double(), expected, rtol=0, atol=0, equal_nan=True)
    assert float(cache.float().nan_to_num().abs().max()) == 448.0
    ops.write_kv(key[:0], value[:0], cache, slots[:0], scales)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size"),
    [
        *[(torch.bfloat16, head_dim, block_size) for head_dim in (64, 80, 128, 256) for block_size in (16, 64)],
        (torch.float16, 80, 16), (torch.float16, 128, 32), (torch.float32, 80, 64), (torch.float32, 256, 16),
    ],
)  # fmt: skip
def test_large_mixed_batch_on_the_gpu(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    lens = [(1, 1), (1, 3000), (1, 257), (1, 1024), (700, 700), (333, 1500), (1, 9), (64, 2048)]
    batch = make_batch(
        lens, num_heads=8, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype, device=DEVICE
    )
    check(triton_ops.OPS, batch)
    if block_size == 16:
        check(triton_ops.OPS, batch, sliding_window=200, soft_cap=20.0)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 7, 8])
def test_long_decodes_on_the_gpu(block_size: int, group: int) -> None:
    """Odd groups and every block size; a static step gives the same bits."""
    lens = [(1, 1), (1, 4097), (1, 16_000), (1, 255), (1, 256)]
    batch = make_batch(
        lens, num_heads=2 * group, num_kv_heads=2, head_dim=128, block_size=block_size, dtype=torch.bfloat16,
        device=DEVICE,
    )  # fmt: skip
    check(triton_ops.OPS, batch)
    scales = scales_of(2)
    found = []
    for is_static in (False, True):
        meta = dataclasses.replace(batch.meta, is_static=is_static, max_seq_len=20_000)
        triton_ops.OPS.prepare(meta, num_heads=2 * group, num_kv_heads=2, head_dim=128, block_size=block_size)
        cache = quantized(batch, scales).kv_cache
        found.append(triton_ops.OPS.paged_attention(batch.query, cache, meta, scale=0.1, kv_scales=scales))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_shared_prefixes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_splits, "MAX_SPLITS", 8)
    prefixes = {1: (0, 256), 2: (0, 128)}
    batch = make_batch([(1, 300), (1, 299), (1, 260), (1, 40)], prefix_of=prefixes, dtype=dtype, device=DEVICE)
    meta = dataclasses.replace(batch.meta, cascade=True)
    check(triton_ops.OPS, dataclasses.replace(batch, meta=meta))
    assert isinstance(meta.plan, triton_ops.TritonPlan)
    assert any(int(shared.count) > 0 for shared in (meta.plan.scratch.shared or {}).values())
