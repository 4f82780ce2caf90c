"""The ring that attends to a step's listed splits: what the kernel means on a CPU, what it gives on a GPU, and the
calls that it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.kernels.attention import AttentionOptions, HeadBias, gluon_decode, triton_decode
from app.kernels.attention.gluon_decode import decode_gluon_kernel
from app.kernels.attention.triton_decode import DecodeCall, DecodeScratch, choose_tile, decode, make_scratch
from app.kernels.kernel_table import HOPPER
from tests.kernels.attention.cases import Batch, contiguous_attention, make_batch
from tests.kernels.gluon_on_cpu import OnCpu

ON_HOPPER = torch.cuda.is_available() and HOPPER.are_met(torch.device("cuda", 0))
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
LENGTHS = [1, 16, 17, 64, 65, 300, 577, 1300]
SCALE = 128**-0.5
PLAIN = AttentionOptions(SCALE)


def step_of(lens: list[int], heads: tuple[int, int], block_size: int, dtype: torch.dtype, device: str) -> Batch:
    """A step as a graph captures it: one token a request."""
    batch = make_batch(
        [(1, length) for length in lens], num_heads=heads[0], num_kv_heads=heads[1], head_dim=128,
        block_size=block_size, dtype=dtype, device=device,
    )  # fmt: skip
    return replace(batch, meta=replace(batch.meta, is_static=True, max_seq_len=8192))


def scratch_of(batch: Batch) -> DecodeScratch:
    scratch = make_scratch(batch.meta, batch.query.shape[1], batch.kv_cache.shape[2], 128)
    scratch.partial.fill_(float("nan"))
    scratch.log_sum.fill_(float("nan"))
    scratch.kernels = (gluon_decode.KERNEL,)
    return scratch


def test_scratch_lies_where_launches_are_looked_up_quickly() -> None:
    batch = step_of([5000, 300, 20], (4, 2), 16, torch.bfloat16, "cpu")
    scratch = make_scratch(batch.meta, 4, 2, 128)
    tensors = (scratch.partial, scratch.log_sum, scratch.arrived, scratch.turn)
    assert [tensor.data_ptr() % 16 for tensor in tensors] == [0] * 4
    assert (scratch.arrived.shape, scratch.turn.shape) == ((3, 2), (1,))


def check_layers(batch: Batch) -> None:
    """Two layers, each by itself: the second one finds what the first one left."""
    scratch = scratch_of(batch)
    for query in (batch.query, -batch.query):
        out = torch.full_like(query, float("nan"))
        decode(query, batch.kv_cache, batch.meta, scratch, out, PLAIN)
        expected = contiguous_attention(replace(batch, query=query), scale=SCALE)
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
        assert not scratch.arrived.any(), "the next layer counts from 0"
        assert not scratch.turn.any(), "and draws from the first split on"


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [(4, 2), (7, 1)])
def test_the_kernel_on_a_cpu(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], block_size: int) -> None:
    """More and fewer splits than programs; one split, several, and a last tile of one token."""
    monkeypatch.setattr(gluon_decode, "LEAST_HEADS", 1)
    monkeypatch.setattr(gluon_decode, "decode_gluon_kernel", OnCpu(decode_gluon_kernel))
    for lens in ([1, 16, 65, 300, 577], [64]):
        check_layers(step_of(lens, heads, block_size, torch.bfloat16, "cpu"))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [
        ((32, 8), 16, torch.bfloat16),
        ((16, 8), 128, torch.float16),
        ((32, 4), 32, torch.bfloat16),
        ((7, 1), 16, torch.bfloat16),
        ((2, 2), 64, torch.float16),
    ],
)
def test_a_step_of_many_requests(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], block_size: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gluon_decode, "LEAST_HEADS", 1)
    check_layers(step_of(LENGTHS * 3, heads, block_size, dtype, "cuda"))


@pytest.mark.gpu
@on_hopper
def test_the_same_bits_every_time() -> None:
    """Whoever draws a split, and whoever merges a request's."""
    batch = step_of([577, 64, 1300, 1] * 8, (32, 8), 16, torch.bfloat16, "cuda")
    scratch, found = scratch_of(batch), []
    for _ in range(300):
        out = torch.full_like(batch.query, float("nan"))
        decode(batch.query, batch.kv_cache, batch.meta, scratch, out, PLAIN)
        found.append(out)
    assert all(torch.equal(one, found[0]) for one in found)


def call_of(batch: Batch, options: AttentionOptions = PLAIN, *, is_shared: bool = False) -> DecodeCall:
    tile = choose_tile(batch.query.shape[2], batch.query.dtype)
    scratch = make_scratch(batch.meta, batch.query.shape[1], batch.kv_cache.shape[2], batch.query.shape[2])
    listed = None
    if batch.meta.is_static:
        nothing = torch.zeros(1, dtype=torch.int32)
        listed = triton_decode.SplitList(nothing.long(), nothing)
    return DecodeCall(
        batch.query, batch.kv_cache, batch.meta, scratch, listed, is_shared, batch.query, options, tile, 1
    )


def test_the_calls_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    few = step_of([5, 70], (4, 2), 16, torch.bfloat16, "cpu")
    assert not gluon_decode.serves(call_of(few)), "few heads: what is ahead of a program would be all there is"
    monkeypatch.setattr(gluon_decode, "LEAST_HEADS", 4)
    assert gluon_decode.serves(call_of(few))
    assert not gluon_decode.serves(call_of(few, is_shared=True))
    assert not gluon_decode.serves(call_of(few, AttentionOptions(SCALE, 64)))
    assert not gluon_decode.serves(call_of(few, AttentionOptions(SCALE, soft_cap=30.0)))
    assert not gluon_decode.serves(call_of(few, AttentionOptions(SCALE, bias=HeadBias(sinks=torch.zeros(4)))))
    assert not gluon_decode.serves(call_of(replace(few, meta=replace(few.meta, is_static=False))))
    assert not gluon_decode.serves(call_of(step_of([5, 70], (4, 2), 16, torch.float32, "cpu")))
    assert not gluon_decode.serves(call_of(step_of([5, 70], (64, 2), 16, torch.bfloat16, "cpu")))
