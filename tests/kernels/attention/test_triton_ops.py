"""The Triton kernels against float64 attention: in Triton's interpreter on a CPU, for real on a GPU.

The interpreter computes bf16 wrongly and knows neither races nor misaligned tiles: those need the GPU variants.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from app.backends import ATTENTION_BACKENDS
from app.errors import ConfigError
from app.kernels.attention import AttentionMetadata, reference, triton_decode, triton_ops, triton_splits
from app.kernels.attention.triton_ops import OPS, TritonPlan
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = [(1, 1), (1, 64), (1, 33), (5, 5), (19, 19), (3, 50), (1, 40)]
# Rows that only pad a tile have seen nothing and divide 0 by 0; they are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def run(batch: Batch, **options: float | int | None) -> torch.Tensor:
    _, _, num_kv_heads, block_size, head_dim = batch.kv_cache.shape
    OPS.prepare(
        batch.meta,
        num_heads=batch.query.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    out = OPS.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=batch.query.shape[2] ** -0.5, **options)
    assert isinstance(batch.meta.plan, TritonPlan)
    assert not batch.meta.plan.scratch.arrived.any(), "the next layer counts from 0"
    return out


def check(batch: Batch, **options: float | int | None) -> None:
    expected = contiguous_attention(batch, scale=batch.query.shape[2] ** -0.5, **options)
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(run(batch, **options).double(), expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def _unwritten_output_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row or a partial result that no kernel writes shows up as NaN."""

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _filled_with_nan(getattr(torch, name)))


def _filled_with_nan(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: object, **options: object) -> torch.Tensor:
        tensor = make(*arguments, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return made


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (7, 1)])
@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed_batch(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check(
        make_batch(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE)
    )


def test_heads_of_fewer_columns_than_a_product_takes() -> None:
    check(make_batch([(1, 20), (9, 12)], num_heads=4, num_kv_heads=2, head_dim=8, device=DEVICE))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(block_size: int) -> None:
    check(make_batch([(1, 63), (1, 65), (40, 70)], block_size=block_size, dtype=torch.float16, device=DEVICE))


@pytest.mark.parametrize("sliding_window", [1, 7, 16, 32, 500])
def test_sliding_window(sliding_window: int) -> None:
    check(make_batch([(1, 70), (1, 5), (20, 70), (9, 9)], device=DEVICE), sliding_window=sliding_window)


@pytest.mark.parametrize("sliding_window", [33, 97, 150, 260])
def test_a_window_wider_than_a_tile_of_queries(sliding_window: int) -> None:
    """Between its two edges, keys are seen by all queries of the tile."""
    check(make_batch([(90, 300), (70, 70)], device=DEVICE), sliding_window=sliding_window)


def test_soft_cap() -> None:
    check(make_batch(MIXED, device=DEVICE), soft_cap=2.0)
    check(make_batch(MIXED, device=DEVICE), soft_cap=30.0, sliding_window=20)


def test_decodes_only_and_prefills_only() -> None:
    check(make_batch([(1, 17), (1, 2)], device=DEVICE))
    check(make_batch([(2, 17), (16, 16), (1, 3)], device=DEVICE))


@pytest.mark.parametrize("sliding_window", [None, 100])
def test_splits_merge(monkeypatch: pytest.MonkeyPatch, sliding_window: int | None) -> None:
    # Small splits: 1 to 8 of them, of unequal lengths, some empty, and more context than MAX_SPLITS short splits hold.
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_splits, "MAX_SPLITS", 8)
    monkeypatch.setattr(triton_decode, "_MERGE_ELEMENTS", 256)
    batch = make_batch([(1, 1), (1, 32), (1, 33), (1, 150), (1, 290), (1, 256)], device=DEVICE)
    check(batch, sliding_window=sliding_window)
    assert isinstance(batch.meta.plan, TritonPlan)
    assert batch.meta.plan.scratch.num_splits == 8
    assert batch.meta.plan.scratch.arrived.shape == (6, 2)


def test_a_decode_is_the_same_bits_alone_and_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    batch = make_batch([(1, 20), (1, 100), (1, 200)], device=DEVICE)
    together = run(batch)
    for request in range(3):
        meta = dataclasses.replace(
            batch.meta,
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            seq_lens=batch.meta.seq_lens[request : request + 1],
            block_table=batch.meta.block_table[request : request + 1],
            max_seq_len=int(batch.meta.seq_lens[request]),
            num_decodes=1,
        )
        alone = dataclasses.replace(batch, query=batch.query[request : request + 1], meta=meta)
        assert torch.equal(run(alone)[0], together[request])


@pytest.mark.parametrize("sliding_window", [None, 70])
def test_a_static_step_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, sliding_window: int | None) -> None:
    """What a captured graph replays: bounds on the host, lengths on the device, programs that share out the splits."""
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_splits, "MAX_SPLITS", 8)
    monkeypatch.setattr(triton_splits, "_LIST_TILE", 2)
    batch = make_batch([(1, 1), (1, 32), (1, 33), (1, 150), (1, 290), (1, 256), (1, 7)], device=DEVICE)
    plainly = run(batch, sliding_window=sliding_window)
    meta = dataclasses.replace(batch.meta, is_static=True, max_seq_len=4096, plan=None)
    assert torch.equal(run(dataclasses.replace(batch, meta=meta), sliding_window=sliding_window), plainly)
    check(dataclasses.replace(batch, meta=meta), sliding_window=sliding_window)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 20, "soft_cap": 15.0}])
def test_few_rows_that_verify_drafts_are_decodes(options: dict[str, float]) -> None:
    """In a static step, on the way of plain decoding: the same bits for the same tokens."""
    batch = make_batch([(4, 90), (4, 4)], device=DEVICE)
    check(dataclasses.replace(batch, meta=dataclasses.replace(batch.meta, is_static=True)), **options)
    of_many = make_batch([(3, 90)] * 3, device=DEVICE)
    meta = dataclasses.replace(of_many.meta, is_static=True)
    check(dataclasses.replace(of_many, meta=meta), **options)
    assert triton_ops.as_decodes(meta) is None


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"sliding_window": 70, "soft_cap": 15.0}])
@pytest.mark.parametrize(("each", "num_heads"), [(2, 6), (4, 4), (5, 4), (8, 8)])
def test_rows_that_verify_drafts_are_decodes_of_several_queries(
    monkeypatch: pytest.MonkeyPatch, each: int, num_heads: int, options: dict[str, float]
) -> None:
    """With splits whose first positions are behind a request's first queries; two key heads; other layers beside."""
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_splits, "MAX_SPLITS", 8)
    monkeypatch.setattr(triton_decode, "_MERGE_ELEMENTS", 256)
    lengths = (each, 32, 33, 65, 66, 150, 290, each + 1)
    batch = make_batch([(each, length) for length in lengths], num_heads=num_heads, device=DEVICE)
    batch = dataclasses.replace(batch, meta=dataclasses.replace(batch.meta, is_static=True, max_seq_len=512))
    check(batch, **options)
    assert isinstance(batch.meta.plan, TritonPlan)
    assert batch.meta.plan.each == each
    again = dataclasses.replace(batch, query=-batch.query)  # the next layer
    assert not torch.equal(run(again, **options), run(batch, **options))


def test_many_queries_and_heads_go_the_way_of_prompts() -> None:
    batch = make_batch([(9, 90)] * 3, num_heads=8, device=DEVICE)
    check(dataclasses.replace(batch, meta=dataclasses.replace(batch.meta, is_static=True)))


def test_layers_of_a_step_share_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts splits from 0 and merges what it wrote itself: with and without a window, another number of them."""
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    batch = make_batch([(1, 20), (1, 100), (1, 200)], device=DEVICE)
    batch.meta.is_static = True
    OPS.prepare(batch.meta, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
    for sliding_window in (None, 70, None):
        query = batch.query if sliding_window is None else -batch.query
        expected = contiguous_attention(
            dataclasses.replace(batch, query=query), scale=0.2, sliding_window=sliding_window
        )
        found = OPS.paged_attention(query, batch.kv_cache, batch.meta, scale=0.2, sliding_window=sliding_window)
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("sliding_window", [None, 70])
def test_the_list_holds_every_split_once(sliding_window: int | None) -> None:
    lens = [1, 255, 256, 257, 5000, 40, 20_000, 512, 513]
    made = triton_splits.list_splits(torch.tensor(lens, dtype=torch.int32, device=DEVICE), 64, 64, sliding_window)
    expected = []
    for request, length in enumerate(lens):
        start = 0 if sliding_window is None else max(0, length - sliding_window) // 64 * 64
        rest = length - start
        per_split = math.ceil(rest / min(64, math.ceil(rest / 256)))
        split = math.ceil(per_split / 64) * 64
        expected += [length << 32 | request * 64 + i for i in range(math.ceil(rest / split))]
    assert made.items[: int(made.count)].tolist() == expected
    assert triton_splits.programs_for(made, 8) >= 1


def test_strided_query_and_cache_of_a_fused_projection() -> None:
    batch = make_batch(MIXED, device=DEVICE)
    fused = torch.cat([batch.query, torch.randn_like(batch.query)], dim=1)
    check(dataclasses.replace(batch, query=fused[:, : batch.query.shape[1]]))


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 32), (3, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_write_kv_equals_the_reference(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(6, 3 * num_kv_heads, head_dim, dtype=dtype, device=DEVICE)
    key, value = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 2 * num_kv_heads :]
    slots = torch.tensor([5, -1, 0, 16, 63, 31], device=DEVICE)
    expected = torch.zeros(4, 2, num_kv_heads, 16, head_dim, dtype=dtype, device=DEVICE)
    got = expected.clone()
    reference.write_kv(key, value, expected, slots)
    OPS.write_kv(key, value, got, slots)
    assert torch.equal(got, expected)
    assert int((got != 0).any(-1).sum()) == 5 * 2 * num_kv_heads
    OPS.write_kv(key[:0], value[:0], got, slots[:0])


def test_shapes_that_no_kernel_serves_are_refused_by_name() -> None:
    meta = make_batch([(1, 1)]).meta
    with pytest.raises(ConfigError, match="block_size=48"):
        OPS.prepare(meta, num_heads=4, num_kv_heads=2, head_dim=32, block_size=48)
    with pytest.raises(ConfigError, match="head_dim=640"):
        OPS.prepare(meta, num_heads=4, num_kv_heads=2, head_dim=640, block_size=16)
    assert ATTENTION_BACKENDS.load("triton") is OPS


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64])
def test_large_mixed_batch_on_the_gpu(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    lens = [(1, 1), (1, 3000), (1, 257), (1, 1024), (700, 700), (333, 1500), (1, 9), (64, 2048)]
    batch = make_batch(
        lens, num_heads=8, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype, device=DEVICE
    )
    check(batch)
    check(batch, sliding_window=200, soft_cap=20.0)


@pytest.mark.gpu
@pytest.mark.parametrize("is_static", [True, False])
@torch.inference_mode()
def test_whoever_finishes_last_the_bits_are_the_same(is_static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step of layers that pass splits through the same scratch, replayed with other queries and lengths."""
    monkeypatch.undo()  # filling new tensors would keep a layer's launch from overlapping the end of the one before
    num_requests, longest, block_size = 20, 4096, 16
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": block_size}
    windows = (None, None, 1000)  # the layers'
    generator = torch.Generator(DEVICE).manual_seed(0)
    num_blocks = num_requests * longest // block_size
    caches = [
        torch.randn(num_blocks, 2, 8, block_size, 128, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        for _ in windows
    ]
    inputs = []
    for _ in range(4):
        lens = torch.randint(1, longest + 1, (num_requests,), device=DEVICE, dtype=torch.int32, generator=generator)
        lens[:5] = torch.tensor([longest, 1, 256, 257, 513], dtype=torch.int32)
        lens = lens[torch.randperm(num_requests, device=DEVICE, generator=generator)]
        query = torch.randn(num_requests, 32, 128, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        inputs.append((query, lens))
    query, lens = (tensor.clone() for tensor in inputs[0])
    table = torch.randperm(num_blocks, device=DEVICE, generator=generator).int().view(num_requests, -1)
    meta = AttentionMetadata(
        query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=lens,
        block_table=table,
        slot_mapping=torch.full((num_requests,), -1, device=DEVICE),
        max_query_len=1,
        max_seq_len=longest,
        num_decodes=num_requests,
        is_static=is_static,
    )

    def attend(index: int, query: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        return OPS.paged_attention(query, caches[index], meta, scale=128**-0.5, sliding_window=windows[index])

    def alone(index: int, query: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """A launch that nothing runs beside."""
        step = dataclasses.replace(meta, seq_lens=lens, is_static=False)
        OPS.prepare(step, **shape)
        torch.cuda.synchronize()
        out = attend(index, query, step)
        torch.cuda.synchronize()
        return out

    expected = [[alone(index, *given) for index in range(len(windows))] for given in inputs]
    assert all(bool(out.isfinite().all()) for outs in expected for out in outs)

    def step() -> list[torch.Tensor]:
        OPS.prepare(meta, **shape)
        return [attend(index, query, meta) for index in range(len(windows))]

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    assert isinstance(meta.plan, TritonPlan)
    scratch = meta.plan.scratch  # what the graph writes
    assert scratch.num_splits == 16
    assert (scratch.lists is not None) == is_static
    for replay in range(100):
        which = replay % len(inputs)
        for buffer, given in zip((query, lens), inputs[which], strict=True):
            buffer.copy_(given)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for index, out in enumerate(outs):
            assert torch.equal(out, expected[which][index]), (replay, index)
        assert not scratch.arrived.any(), replay
