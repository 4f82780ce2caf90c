"""Products of few rows between layer norms against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from app.kernels.fused import GatedActivation
from app.kernels.gemm import DeferredLayerNorm
from app.kernels.gemm.triton_layer_norm import OPS, HeldTile, held_linear, held_tile
from tests.kernels.gemm.test_triton_small import DEVICE, EPS, TOLERANCE, relative_error, tensors

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def check(
    tile: HeldTile,
    rows: int,
    columns: int,
    size: int,
    dtype: torch.dtype,
    device: str,
    activations: Sequence[GatedActivation] = get_args(GatedActivation),
) -> None:
    """Rows far from zero: as they are, normed with and without a bias; activations; a residual."""
    weight, bias = tensors(rows, columns, size, dtype, device)[1:]
    x = (torch.randn(rows, size + 8, device=device) * 3 + 7).to(dtype)[:, :size]
    norm, shift = (torch.randn(size, device=device).to(dtype) for _ in range(2))
    residual = torch.randn(rows, columns + 8, dtype=dtype, device=device)[:, :columns] * 5
    for given, own_shift in ((bias, shift), (None, None)):
        deferred = DeferredLayerNorm(x, norm, own_shift, EPS)
        wide_shift = None if own_shift is None else own_shift.double()
        normed = F.layer_norm(x.double(), (size,), norm.double(), wide_shift, EPS)
        assert relative_error(deferred.materialize(), normed) < TOLERANCE[dtype]
        for read, wide in ((x, x.double()), (deferred, normed)):
            truth = F.linear(wide, weight.double(), None if given is None else given.double())
            out = held_linear(read, weight, given, tile)
            assert out.dtype == dtype
            assert relative_error(out, truth) < TOLERANCE[dtype]
            for activation in activations:
                out = held_linear(read, weight, given, tile, activation)
                assert relative_error(out, ACTIVATIONS[activation](truth)) < TOLERANCE[dtype]
            out = held_linear(read, weight, given, tile, residual=residual)
            assert relative_error(out, truth + residual.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tile", "rows", "columns", "size"),
    [(HeldTile(8, 64), 1, 64, 64), (HeldTile(4, 128), 3, 50, 96), (HeldTile(1, 512), 4, 7, 300)],
)
def test_against_float64(dtype: torch.dtype, tile: HeldTile, rows: int, columns: int, size: int) -> None:
    check(tile, rows, columns, size, dtype, DEVICE)


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("may_defer", [True, False])
def test_the_operations(rows: int, may_defer: bool) -> None:
    """Few rows, whose norm is deferred where its readers are products, and more."""
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


def test_tiles() -> None:
    """Those of Whisper's largest decoder hold sixty-four numbers a thread; a weight too wide is the library's."""
    for columns, size, expected in ((3840, 1280, (8, 2048)), (1280, 5120, (2, 8192)), (96, 64, (1, 64))):
        tile = held_tile(1, torch.empty(columns, size), torch.bfloat16)
        assert tile == HeldTile(*expected)
    assert held_tile(5, torch.empty(64, 64), torch.bfloat16) is None
    assert held_tile(1, torch.empty(64, 64), torch.float32) is None
    assert held_tile(1, torch.empty(64, 16_448), torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4])
def test_on_a_gpu(dtype: torch.dtype, rows: int) -> None:
    for columns, size in ((3840, 1280), (1280, 5120), (1000, 512)):
        tile = held_tile(rows, torch.empty(columns, size), dtype)
        assert tile is not None
        check(tile, rows, columns, size, dtype, "cuda", ["gelu"])  # each takes seconds to compile


@pytest.mark.gpu
def test_a_chain_of_launches_on_a_gpu() -> None:
    """Each begins before the one before it ends: the sums are those of launches one after another."""
    torch.manual_seed(0)
    weights = [torch.randn(1280, 1280, device="cuda").bfloat16() / 36 for _ in range(24)]
    norm, x = torch.randn(1280, device="cuda").bfloat16(), torch.randn(1, 1280, device="cuda").bfloat16()
    tile = held_tile(1, weights[0], torch.bfloat16)
    assert tile is not None

    def run(waits: bool) -> torch.Tensor:
        total = x
        for weight in weights:
            total = held_linear(DeferredLayerNorm(total, norm, None, EPS), weight, None, tile, residual=total)
            if waits:
                torch.cuda.synchronize()
        return total

    expected = run(waits=True)
    for _ in range(200):
        assert torch.equal(run(waits=False), expected)
