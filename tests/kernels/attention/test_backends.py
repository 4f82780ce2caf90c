"""Every attention backend of the table against float64 attention, over the same odd shapes and all of its features.

Triton runs in its interpreter where there is no GPU; with one, all run there, in 16 bits too.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from app.backends import ATTENTION_BACKENDS, EXACT_ATTENTION
from app.kernels.attention import FEATURES, KV_FP8, AttentionOps, HeadBias, flex, triton_decode, triton_splits
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Decodes first: one token, a whole block and one more, several splits; prompts whole, chunked, and of a single token.
LENS = [(1, 1), (1, 16), (1, 17), (1, 90), (5, 5), (33, 33), (7, 70), (1, 40)]
SHAPES = [(2, 2, 32, 16), (4, 2, 80, 32), (7, 1, 48, 16)]  # query heads, KV heads, head size, block size
TOLERANCE = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


# What serves few features, on a CPU alone, has its own tests (test_fixed_tiles.py).
@pytest.fixture(params=[name for name in ATTENTION_BACKENDS if name not in EXACT_ATTENTION.values()])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionOps:
    """With splits so small that contexts of a few blocks have several."""
    monkeypatch.setattr(triton_splits, "SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_decode, "_MERGE_ELEMENTS", 256)
    found: AttentionOps = ATTENTION_BACKENDS.load(request.param)
    assert found.features <= FEATURES.keys()
    return found


def check(ops: AttentionOps, batch: Batch, expected: Batch | None = None, **options: Any) -> None:
    """`expected`: the batch to judge by, where the cache is quantized."""
    (num_heads, head_dim), scale = batch.query.shape[1:], 0.2
    _, _, num_kv_heads, block_size, _ = batch.kv_cache.shape
    ops.prepare(batch.meta, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    kv_scales = options.pop("kv_scales", None)
    more = {} if kv_scales is None else {"kv_scales": kv_scales}
    found = ops.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=scale, **options, **more)
    judged = contiguous_attention(expected or batch, scale=scale, **options)
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(found.double(), judged, atol=tolerance, rtol=tolerance)


def bias(num_heads: int, names: str) -> HeadBias:
    generator = torch.Generator().manual_seed(num_heads)
    sinks = torch.randn(num_heads, generator=generator).mul(3).to(DEVICE)
    slopes = torch.rand(num_heads, generator=generator).to(DEVICE)
    table = torch.randn(num_heads, 37, generator=generator).to(DEVICE)
    return HeadBias(
        sinks if "sinks" in names else None,
        slopes if "alibi" in names else None,
        table if "distance_bias" in names else None,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes(ops: AttentionOps, shape: tuple[int, int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    check(ops, make_batch(LENS, device=DEVICE, **sizes))
    check(ops, make_batch([(3, 3)], device=DEVICE, seed=2, **sizes))


@pytest.mark.parametrize(
    ("sliding_window", "soft_cap", "names"),
    [
        *((7, None, ""), (20, 2.0, ""), (None, 5.0, ""), (None, None, "sinks"), (None, None, "alibi")),
        *((None, None, "distance_bias"), (20, 5.0, "all")),
    ],
)
def test_features(ops: AttentionOps, sliding_window: int | None, soft_cap: float | None, names: str) -> None:
    """Each that the backend says it has, and all at once."""
    names = "sinks alibi distance_bias" if names == "all" else names
    options: dict[str, Any] = {"sliding_window": sliding_window, "soft_cap": soft_cap}
    wanted = {*names.split(), *(name for name, value in options.items() if value is not None)}
    if not wanted <= ops.features:
        pytest.skip(f"{ops.name} says that it lacks {wanted - ops.features}")
    if names:
        options["bias"] = bias(4, names)
    check(ops, make_batch(LENS, device=DEVICE), **options)


@pytest.mark.parametrize("names", ["", "sinks alibi", "distance_bias"])
def test_a_quantized_cache(ops: AttentionOps, names: str) -> None:
    """Keys and values are numbers that fp8 has, so the scales are all that may go wrong."""
    check_quantized(ops, LENS, names)


def check_quantized(ops: AttentionOps, lens: list[tuple[int, int]], names: str, *, is_static: bool = False) -> None:
    batch, judged = (make_batch(lens, device=DEVICE) for _ in range(2))
    scales = torch.tensor([[0.5, 2.0], [4.0, 0.25]], device=DEVICE)
    batch.kv_cache, batch.meta.is_static = batch.kv_cache.to(KV_FP8), is_static
    for kind, own in enumerate((judged.keys, judged.values)):
        for request, stored in enumerate(own):
            own[request] = stored.to(KV_FP8).float() * scales[kind][:, None]
    options: dict[str, Any] = {"bias": bias(4, names)} if names else {}
    check(ops, batch, judged, kv_scales=scales, **options)


def test_a_static_step_with_sinks_counts_each_once() -> None:
    """What a captured graph replays, as it goes through another list of splits, shared ones too."""
    ops: AttentionOps = ATTENTION_BACKENDS.load("triton")
    for cascade, names in itertools.product((False, True), ("sinks", "alibi", "sinks alibi", "distance_bias")):
        batch = make_batch([(1, 300), (1, 290), (1, 17)], device=DEVICE, prefix_of={1: (0, 256)})
        batch.meta.is_static, batch.meta.cascade = True, cascade
        check(ops, batch, bias=bias(4, names))


@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_static_step_that_verifies_drafts_has_its_biases(is_quantized: bool) -> None:
    """Four queries a request, of which the first see nothing of the last split."""
    ops: AttentionOps = ATTENTION_BACKENDS.load("triton")
    lens = [(4, 257), (4, 258), (4, 290), (4, 17)]
    if is_quantized:
        check_quantized(ops, lens, "sinks alibi", is_static=True)
        return
    batch = make_batch(lens, device=DEVICE)
    batch.meta.is_static = True
    check(ops, batch, bias=bias(4, "sinks alibi"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_the_gpu(ops: AttentionOps, dtype: torch.dtype, head_dim: int) -> None:
    lens = [(1, 1), (1, 3000), (1, 257), (1, 1024), (700, 700), (333, 1500), (1, 9), (64, 2048)]
    batch = make_batch(lens, num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=dtype, device=DEVICE)
    check(ops, batch)
    check(ops, batch, sliding_window=200, soft_cap=20.0)
    check(ops, batch, bias=bias(8, "sinks alibi"))
    check(ops, batch, bias=bias(8, "distance_bias"))


def test_flex_visits_the_tiles_of_its_own_requests_alone() -> None:
    """A step as on a GPU, where one call serves all of its requests; and a block mask for each window, made once."""
    lens = torch.tensor([700, 1, 300])
    starts = [0, 130, 131, 431]
    part = flex._part(range(3), starts, lens.tolist(), torch.arange(3 * 44).view(3, 44), 16)
    assert (part.first, part.end, len(part.blocks)) == (0, 431, 44 + 1 + 19)
    mask = part.mask(None)
    assert part.mask(None) is mask
    assert part.mask(9) is not mask
    dense = mask.to_dense()[0, 0].bool()  # tiles of 128
    q, k = torch.arange(431)[:, None], torch.arange(len(part.key_request))
    for window in (None, 9):
        seen = part.sees(q, k, window)
        assert int(seen.sum()) == sum(
            min(position + 1, window or position + 1)
            for length, count in ((700, 130), (1, 1), (300, 300))
            for position in range(length - count, length)
        )
        rows, columns = seen.nonzero(as_tuple=True)
        assert bool(dense[rows // 128, columns // 128].all())
    assert not dense.all()
