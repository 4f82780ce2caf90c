"""The other prefill kernels against float64 attention: Triton's interpreter on a CPU, for real on a GPU.

The interpreter cannot run Gluon: its kernel is tested on a GPU only.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from app.kernels.attention import cudnn_prefill, gluon_prefill, prefill_choice, triton_prefill_descriptors
from app.kernels.attention.triton_ops import OPS
from app.kernels.attention.triton_prefill import PrefillTile
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability()[0] == 9
# Rows that only pad a tile have seen nothing and divide 0 by 0; they are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
LENS = [(1, 9), (1, 70), (5, 5), (70, 70), (3, 130), (33, 64)]
TILE = PrefillTile(rows=32, keys=32, num_warps=4, num_stages=2)


def error_of(out: torch.Tensor, batch: Batch, **options: float | int | None) -> float:
    first = batch.meta.num_decodes
    truth = contiguous_attention(batch, scale=batch.query.shape[2] ** -0.5, **options)[first:]
    return float((out[first:].double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads", "head_dim", "options"),
    [
        (16, 4, 2, 64, {}),
        (32, 4, 4, 32, {"sliding_window": 20}),
        (64, 7, 1, 32, {}),
        (64, 4, 2, 64, {"sliding_window": 33, "soft_cap": 10.0}),
        (128, 2, 1, 128, {"soft_cap": 5.0}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if ON_GPU else [])])
def test_descriptors(
    block_size: int, num_heads: int, num_kv_heads: int, head_dim: int, options: dict[str, float], dtype: torch.dtype
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    batch = make_batch(LENS, dtype=dtype, device=DEVICE, **shape)
    assert triton_prefill_descriptors.serves(batch.query, batch.kv_cache, batch.meta, TILE)
    out = torch.full_like(batch.query, float("nan"))
    masks = {"sliding_window": None, "soft_cap": None, **options}
    triton_prefill_descriptors.prefill(
        batch.query, batch.kv_cache, batch.meta, out, scale=head_dim**-0.5, tile=TILE, **masks
    )
    assert error_of(out, batch, **options) < (8e-3 if dtype == torch.bfloat16 else 1e-3)
    assert bool(out[: batch.meta.num_decodes].isnan().all()), "decodes are not this kernel's"


def test_gather_context_leaves_zeros_past_a_request() -> None:
    batch = make_batch([(1, 5), (20, 20), (3, 37)], head_dim=40, device=DEVICE)
    gathered = triton_prefill_descriptors.gather_context(batch.kv_cache, batch.meta, 128)
    assert gathered.shape == (2, 2, 2, 128, 40)
    for request, length in ((1, 20), (2, 37)):
        assert torch.equal(gathered[request - 1, 0, :, :length], batch.keys[request].transpose(0, 1))
        assert torch.equal(gathered[request - 1, 1, :, :length], batch.values[request].transpose(0, 1))
        assert not bool(gathered[request - 1, :, :, length:].any())


def test_descriptors_refuse_odd_heads_and_a_large_scratch() -> None:
    batch = make_batch(LENS, head_dim=80, dtype=torch.float16, device=DEVICE)
    assert not triton_prefill_descriptors.serves(batch.query, batch.kv_cache, batch.meta, TILE)
    batch = make_batch(LENS, head_dim=64, dtype=torch.float16, device=DEVICE)
    with mock.patch.object(triton_prefill_descriptors, "MAX_SCRATCH_BYTES", 1000):
        assert not triton_prefill_descriptors.serves(batch.query, batch.kv_cache, batch.meta, TILE)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads", "head_dim"),
    [(16, 4, 2, 64), (32, 4, 4, 128), (64, 7, 1, 64), (16, 8, 2, 128), (128, 2, 1, 128), (256, 8, 1, 128)],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gluon(block_size: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    batch = make_batch([*LENS, (129, 129), (200, 457)], dtype=dtype, device=DEVICE, **shape)
    assert gluon_prefill.serves(batch.query, batch.kv_cache, None, None)
    out = torch.full_like(batch.query, float("nan"))
    gluon_prefill.prefill(batch.query, batch.kv_cache, batch.meta, out, scale=head_dim**-0.5)
    assert error_of(out, batch) < (8e-3 if dtype == torch.bfloat16 else 1e-3)
    assert bool(out[: batch.meta.num_decodes].isnan().all()), "decodes are not this kernel's"


def test_gluon_refuses_what_its_kernel_lacks() -> None:
    batch = make_batch(LENS, head_dim=64, dtype=torch.float16, device=DEVICE)
    assert not gluon_prefill.serves(batch.query, batch.kv_cache, 20, None)
    assert not gluon_prefill.serves(batch.query, batch.kv_cache, None, 30.0)
    assert not gluon_prefill.serves(batch.query.float(), batch.kv_cache.float(), None, None)
    assert gluon_prefill.serves(batch.query, batch.kv_cache, None, None) is ON_HOPPER


def attend_in_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for cuDNN where there is none."""
    group = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = query.double() @ key.transpose(2, 3) * scale
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (F.softmax(scores, -1) @ value).to(query.dtype), scores.logsumexp(-1)


@pytest.mark.parametrize("num_cached", [0, 16, 32])
def test_a_chunk_and_what_was_cached_merge(num_cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_prefill, "GRID", 16)
    monkeypatch.setattr(cudnn_prefill, "LEAST_QUERY", 16)
    batch = make_batch(
        [(48, 48 + num_cached)], num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16, device=DEVICE
    )
    assert cudnn_prefill.serves(batch.query, batch.kv_cache, batch.meta, None, None)
    assert not cudnn_prefill.serves(batch.query, batch.kv_cache, batch.meta, 20, None)
    if not ON_GPU:
        monkeypatch.setattr(cudnn_prefill, "attend", attend_in_torch)
    out = torch.full_like(batch.query, float("nan"))
    cudnn_prefill.prefill(batch.query, batch.kv_cache, batch.meta, out, scale=0.125)
    assert error_of(out, batch) < 1.5e-3


@pytest.mark.parametrize("order", [("descriptors", "paged"), ("cudnn", "paged"), ("gluon", "paged")])
def test_the_order_decides_and_paged_serves_the_rest(order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_choice, "PREFILL_ORDER", order)
    for head_dim in (64, 80):
        batch = make_batch([(1, 20), (5, 5), (20, 70)], head_dim=head_dim, dtype=torch.float16, device=DEVICE)
        OPS.prepare(batch.meta, num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=16)
        out = OPS.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=head_dim**-0.5)
        assert error_of(out, batch) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("num_cached", [0, 1024])
@pytest.mark.parametrize("kernel", ["descriptors", "cudnn", "gluon"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_model_sized_chunk_on_the_gpu(
    kernel: str, num_cached: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_choice, "PREFILL_ORDER", (kernel, "paged"))
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": block_size}
    batch = make_batch([(1024, 1024 + num_cached)], dtype=torch.bfloat16, device=DEVICE, **shape)
    OPS.prepare(batch.meta, num_heads=32, num_kv_heads=8, head_dim=128, block_size=block_size)
    out = OPS.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=128**-0.5)
    assert error_of(out, batch) < 8e-3
