"""Products of few rows between layer norms against float64, and in the layers that use them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from app.kernels.fused import GatedActivation
from app.kernels.gemm import DeferredLayerNorm, triton_layer_norm
from app.kernels.gemm.triton_layer_norm import OPS, linear_add_moments, normed_linear, normed_tile
from app.kernels.gemm.triton_small import SmallTile, arrival_counters
from tests.kernels.gemm.test_triton_small import DEVICE, EPS, TOLERANCE, relative_error, tensors

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def check(tile: SmallTile, rows: int, columns: int, size: int, dtype: torch.dtype, device: str) -> None:
    """A product that is added to a residual far from zero, its moments, and a product that reads it normed."""
    x, weight, bias = tensors(rows, columns, size, dtype, device)
    residual = (torch.randn(rows, columns + 8, device=device) * 3 + 7).to(dtype)[:, :columns]
    norm, shift = (torch.randn(columns, device=device).to(dtype) for _ in range(2))
    reads, reads_bias = torch.randn(48, columns, device=device).to(dtype) / columns**0.5, bias[:1].expand(48)
    for given, own_bias in ((bias, shift), (None, None)):
        wide_bias = None if given is None else given.double()
        moments, total = linear_add_moments(x, weight, given, residual, tile, True)
        truth = F.linear(x.double(), weight.double(), wide_bias) + residual.double()
        assert relative_error(total, truth) < TOLERANCE[dtype]
        assert moments is not None
        parts = total.double().split(tile.columns, dim=1)
        sums = torch.stack([part.sum(1) for part in parts], 1)
        apart = torch.stack([(part - part.mean(1, keepdim=True)).square().sum(1) for part in parts], 1)
        torch.testing.assert_close(moments.double(), torch.stack((sums, apart)), rtol=1e-4, atol=1e-4)
        none, alone = linear_add_moments(x, weight, given, residual, tile, False)
        assert none is None
        assert torch.equal(alone, total)
        deferred = DeferredLayerNorm(total, moments, tile.columns, norm, own_bias, EPS)
        wide_shift = None if own_bias is None else own_bias.double()
        normed = F.layer_norm(total.double(), (columns,), norm.double(), wide_shift, EPS)
        assert relative_error(deferred.materialize(), normed) < TOLERANCE[dtype]
        whole = SmallTile(32, 32, 4, 3)
        product = F.linear(normed, reads.double(), None if given is None else reads_bias.double())
        out = normed_linear(deferred, reads, None if given is None else reads_bias.contiguous(), whole)
        assert out.dtype == dtype
        assert relative_error(out, product) < TOLERANCE[dtype]
        for activation in get_args(GatedActivation):
            out = normed_linear(deferred, reads, None if given is None else reads_bias.contiguous(), whole, activation)
            assert relative_error(out, ACTIVATIONS[activation](product)) < TOLERANCE[dtype]
    assert not arrival_counters(x.device).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tile", "rows", "columns"),
    [
        (SmallTile(32, 64, 4, 3), 1, 64),
        (SmallTile(32, 64, 4, 3), 17, 96),
        (SmallTile(16, 64, 4, 3, splits=2), 3, 160),
        (SmallTile(64, 32, 4, 3, splits=8), 33, 224),  # the last tile of columns is not full
    ],
)
def test_against_float64(dtype: torch.dtype, tile: SmallTile, rows: int, columns: int) -> None:
    check(tile, rows, columns, 256, dtype, DEVICE)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("may_defer", [True, False])
def test_the_operations(rows: int, may_defer: bool) -> None:
    """Few rows, whose norm is deferred where its readers are products, and many."""
    x, weight, bias = tensors(rows, 128, 256, torch.float16)
    residual, norm = torch.randn(rows, 128, device=DEVICE).half(), torch.randn(128, device=DEVICE).half()
    ops = OPS.layer_norm
    assert ops is not None
    normed, total = ops.linear_add_norm(x, weight, bias, residual, norm, bias, EPS, may_defer)
    assert isinstance(normed, DeferredLayerNorm) == (may_defer and rows == 3)
    truth = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
    assert relative_error(total, truth) < 2e-3
    expected = F.layer_norm(truth, (128,), norm.double(), bias.double(), EPS)
    if isinstance(normed, DeferredLayerNorm):
        reads = torch.randn(64, 128, device=DEVICE).half()
        out = ops.linear(normed, reads, None, "gelu")
        assert relative_error(out, F.gelu(F.linear(expected, reads.double()))) < 5e-3
    else:
        assert relative_error(normed, expected) < 5e-3


def test_sizes_that_no_tile_divides_are_not_deferred() -> None:
    x, weight, bias = tensors(4, 96, 256, torch.float16)  # 96 columns are no whole number of tiles to read
    ops = OPS.layer_norm
    assert ops is not None
    normed, total = ops.linear_add_norm(x, weight, bias, x[:, :96], bias, None, EPS, True)
    assert isinstance(normed, torch.Tensor)
    torch.testing.assert_close(normed, F.layer_norm(total, (96,), bias, None, EPS))


@pytest.mark.parametrize("columns", [1280, 3840, 5120, 51_866])
def test_tiles_fill_the_device(columns: int) -> None:
    """Those of Whisper's largest decoder."""
    for rows in (1, 32):
        tile = normed_tile(rows, columns, 1280)
        assert tile is not None
        assert 1280 % tile.depth == 0
        assert -(-columns // tile.columns) >= 80


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64])
def test_on_a_gpu(dtype: torch.dtype, rows: int) -> None:
    for columns, size in ((1280, 1280), (1280, 5120), (384, 1536), (1000, 512)):
        tile = triton_layer_norm.added_tile(torch.empty(rows, size, dtype=dtype), torch.empty(columns, size))
        assert tile is not None
        if columns % 32 == 0:
            check(tile, rows, columns, size, dtype, "cuda")
    for columns in (1280, 3840, 5120):
        tile = normed_tile(rows, columns, 1280)
        assert tile is not None
        x = torch.randn(rows, 1280, device="cuda").to(dtype)
        weight = torch.randn(columns, 1280, device="cuda").to(dtype) / 36
        parts = x.double().split(32, dim=1)
        moments = torch.stack(
            [
                torch.stack([part.sum(1) for part in parts], 1),
                torch.stack([(part - part.mean(1, keepdim=True)).square().sum(1) for part in parts], 1),
            ]
        ).float()
        deferred = DeferredLayerNorm(x, moments, 32, torch.ones(1280, device="cuda", dtype=dtype), None, EPS)
        truth = F.linear(F.layer_norm(x.double(), (1280,), eps=EPS), weight.double())
        assert relative_error(normed_linear(deferred, weight, None, tile), truth) < TOLERANCE[dtype]
