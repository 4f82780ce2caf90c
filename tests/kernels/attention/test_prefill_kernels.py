"""The prefill kernel for Hopper against float64 attention. The interpreter cannot run Gluon: it runs on a GPU only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.jit import JITFunction

from app.kernels.attention import AttentionOptions, HeadBias, gluon_prefill, triton_prefill
from app.kernels.attention.triton_ops import OPS, PREFILL
from app.kernels.kernel_table import HOPPER
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch
from tests.kernels.stub_gpu import as_on

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ON_HOPPER = ON_GPU and HOPPER.are_met(torch.device("cuda", 0))
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
LENS = [(1, 9), (1, 70), (5, 5), (70, 70), (3, 130), (33, 64)]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
PLAIN = AttentionOptions(1.0)


def error_of(out: torch.Tensor, batch: Batch, sliding_window: int | None = None, bias: HeadBias | None = None) -> float:
    first = batch.meta.num_decodes
    scale = batch.query.shape[2] ** -0.5
    truth = contiguous_attention(batch, scale=scale, sliding_window=sliding_window, bias=bias)[first:]
    return float((out[first:].double() - truth).norm() / truth.norm())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads", "head_dim"),
    [(16, 4, 2, 64), (32, 4, 4, 128), (64, 7, 1, 64), (16, 8, 2, 128), (128, 2, 1, 128), (256, 8, 1, 128)],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_gluon(block_size: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    batch = make_batch([*LENS, (129, 129), (200, 457)], dtype=dtype, device=DEVICE, **shape)
    options = AttentionOptions(head_dim**-0.5)
    assert gluon_prefill.serves(batch.query, batch.kv_cache, options)
    out = torch.full_like(batch.query, float("nan"))
    gluon_prefill.prefill(batch.query, batch.kv_cache, batch.meta, out, options)
    assert error_of(out, batch) < TOLERANCE[dtype]
    assert bool(out[: batch.meta.num_decodes].isnan().all()), "decodes are not this kernel's"


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("window", [None, 1, 3, 16, 128, 129, 300])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads", "head_dim"), [(16, 64, 8, 64), (64, 8, 1, 64), (16, 7, 7, 128)]
)
def test_gluon_with_windows_and_sinks(
    window: int | None, has_sinks: bool, block_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    lens = [*LENS, (129, 129), (200, 457), (1, 900), (300, 1300)]
    batch = make_batch(lens, dtype=torch.bfloat16, device=DEVICE, **shape)
    truth = make_batch(lens, dtype=torch.bfloat16, device=DEVICE, **shape)
    sinks = torch.randn(num_heads, device=DEVICE) * 2 if has_sinks else None
    for (num_query, seq_len), table in zip(lens, batch.meta.block_table, strict=True):  # what nobody sees is anybody's
        if window is not None:
            gone = max(0, seq_len - num_query - window + 1) // block_size
            batch.kv_cache[table[:gone].long()] = float("nan")
    bias = HeadBias(sinks=sinks)
    options = AttentionOptions(head_dim**-0.5, window, bias=bias)
    assert gluon_prefill.serves(batch.query, batch.kv_cache, replace(options, sliding_window=1024))
    out = torch.full_like(batch.query, float("nan"))
    gluon_prefill.prefill(batch.query, batch.kv_cache, batch.meta, out, options)
    assert error_of(out, truth, window, bias) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("head_dim", "num_heads", "num_kv_heads"), [(64, 64, 8), (128, 8, 8)])
def test_both_groups_hide_what_lies_on_both_sides_of_one_tile(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """One tile is the first and the last of a window: thousands of programs, again and again, as a race needs luck, and
    queries from memory, whose delay parts the groups."""
    shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": 16}
    lens = [(16 + i % 3, 60 + i % 60) for i in range(250)]
    batch = make_batch(lens, dtype=torch.bfloat16, device=DEVICE, **shape)
    for (num_query, seq_len), table in zip(lens, batch.meta.block_table, strict=True):
        batch.kv_cache[table[: (seq_len - num_query - 3 + 1) // 16].long()] = float("nan")
    wrong, flush = torch.zeros((), dtype=torch.int64, device=DEVICE), torch.empty(1 << 27, device=DEVICE)
    for _ in range(200):
        flush.zero_()
        out = torch.zeros_like(batch.query)
        gluon_prefill.prefill(batch.query, batch.kv_cache, batch.meta, out, AttentionOptions(head_dim**-0.5, 3))
        wrong += out.isnan().sum()
    assert int(wrong) == 0


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_cached", [0, 1024])
@pytest.mark.parametrize("block_size", [16, 64])
def test_model_sized_chunk_on_the_gpu(num_cached: int, block_size: int) -> None:
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": block_size}
    batch = make_batch([(1024, 1024 + num_cached)], dtype=torch.bfloat16, device=DEVICE, **shape)
    OPS.prepare(batch.meta, num_heads=32, num_kv_heads=8, head_dim=128, block_size=block_size)
    with mock.patch.object(triton_prefill, "serves", side_effect=AssertionError("the paged kernel ran")):
        out = OPS.paged_attention(batch.query, batch.kv_cache, batch.meta, scale=128**-0.5)
    assert error_of(out, batch) < TOLERANCE[torch.bfloat16]


@pytest.mark.gpu
@on_hopper
def test_one_binary_serves_all_steps() -> None:
    """A compilation in traffic would hold up everybody: numbers that change from step to step must not ask for one."""

    def prefill(lens: list[tuple[int, int]]) -> None:
        batch = make_batch(lens, num_heads=8, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16, device=DEVICE)
        out = torch.empty_like(batch.query)
        gluon_prefill.prefill(batch.query, batch.kv_cache, batch.meta, out, AttentionOptions(128**-0.5))

    prefill([(64, 64)])
    with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled again")):
        few = [(1, 9), (16, 16)], [(5, 5), (7, 2000)], [(2100, 2100)], [(2, 2)]
        for lens in (*few, [(1, 3)] * 16 + [(100, 300)] * 2):
            prefill(lens)


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, AttentionOptions(1.0, bias=HeadBias(slopes=torch.zeros(4)))),
        ({}, AttentionOptions(1.0, bias=HeadBias(by_distance=torch.zeros(4, 8)))),
        ({}, AttentionOptions(1.0, soft_cap=30.0)),
        ({}, AttentionOptions(1.0, 128)),  # heads of 64: the other kernel is faster
        ({"dtype": torch.float32}, PLAIN),
        ({"head_dim": 80}, PLAIN),
        ({"num_heads": 65, "num_kv_heads": 1}, PLAIN),
    ],
)
def test_gluon_refuses_what_its_kernel_lacks(changes: dict[str, Any], options: AttentionOptions) -> None:
    shape = {"head_dim": 64, "dtype": torch.float16, **changes}
    batch = make_batch(LENS, device=DEVICE, **shape)
    assert not gluon_prefill.serves(batch.query, batch.kv_cache, options)


def test_gluon_refuses_a_cache_with_gaps() -> None:
    """Its descriptor takes the cache for rows that follow each other."""
    batch = make_batch(LENS, num_heads=64, num_kv_heads=1, head_dim=64, dtype=torch.float16, device=DEVICE)
    assert gluon_prefill.serves(batch.query, batch.kv_cache, PLAIN)
    with_gaps = torch.cat((batch.kv_cache, batch.kv_cache), dim=2)[:, :, :1]
    assert torch.equal(with_gaps.nan_to_num(), batch.kv_cache.nan_to_num())
    assert not gluon_prefill.serves(batch.query, with_gaps, PLAIN)


@pytest.mark.parametrize("generation", [0, 8, 9, 10, 12])
def test_gluon_serves_on_hopper_alone(generation: int) -> None:
    with as_on(generation):
        kernels = PREFILL.all_on(torch.device("cpu"))
    assert (gluon_prefill.KERNEL in kernels) == (generation == 9)
    assert kernels[-1] is triton_prefill.KERNEL
