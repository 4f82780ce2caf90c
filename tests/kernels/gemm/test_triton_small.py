"""Products of few rows against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from app.kernels.fused import GatedActivation, PlainActivation
from app.kernels.gemm import DeferredNorm, reference, triton_small
from app.kernels.gemm.small_tiles import SmallTile, deferred_tile, split_tile
from app.kernels.gemm.triton_small import activated_linear, arrival_counters, small_linear, small_linear_add
from app.layers.activation import ACTIVATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
# Bounds that hold for a deferred norm, too: what is rounded is not divided yet, which the rounding of a float does not
# mind.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


def tensors(
    rows: int, columns: int, size: int, dtype: torch.dtype, device: str = DEVICE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias."""
    torch.manual_seed(rows + columns)
    made = torch.randn(rows, size), torch.randn(columns, size) / size**0.5, torch.randn(columns)
    x, weight, bias = (tensor.to(device, dtype) for tensor in made)
    return x, weight, bias


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    return float((out.double() - truth).norm() / truth.norm())


def check(tile: SmallTile, rows: int, columns: int, size: int, dtype: torch.dtype, device: str) -> None:
    """With and without a bias: normal rows and those of a deferred norm, then gated, then added to a residual."""
    x, weight, bias = tensors(rows, columns, size, dtype, device)
    norm = torch.randn(size, dtype=dtype, device=device)
    deferred = DeferredNorm(x * norm, x.double().square().unflatten(1, (8, -1)).sum(2).float(), EPS)
    assert relative_error(deferred.materialize(), rms_norm(x.double(), norm)) < TOLERANCE[dtype]
    for given in (None, bias):
        wide_bias = None if given is None else given.double()
        for rows_of, normed in ((x, x.double()), (deferred, rms_norm(x.double(), norm))):
            whole = replace(tile, splits=1)
            truth = F.linear(normed, weight.double(), wide_bias)
            out = small_linear(rows_of, weight, given, whole)
            assert out.dtype == dtype
            assert relative_error(out, truth) < TOLERANCE[dtype]
            out = small_linear(rows_of, weight, given, whole, "relu2")
            assert relative_error(out, F.relu(truth).square()) < 2 * TOLERANCE[dtype]
            if columns % 2 == 0:
                gate, up = truth.chunk(2, dim=-1)
                out = small_linear(rows_of, weight, given, whole, "silu", is_gated=True)
                assert relative_error(out, F.silu(gate) * up) < TOLERANCE[dtype]
        check_add(tile, x, weight, given)


def check_add(tile: SmallTile, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The sum with the residual, its deferred norm, and counters that are left zero."""
    columns, dtype = len(weight), x.dtype
    residual = torch.randn(len(x), columns + 8, dtype=dtype, device=x.device)[:, :columns] * 5
    norm = torch.randn(columns, dtype=dtype, device=x.device)
    deferred, total = small_linear_add(x, weight, bias, residual, tile, (norm, EPS))
    truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double()) + residual.double()
    assert relative_error(total, truth) < TOLERANCE[dtype]
    assert deferred is not None
    assert torch.equal(deferred.rows, total * norm)
    squares = total.double().square().sum(1)
    torch.testing.assert_close(deferred.squares.double().sum(1), squares, rtol=1e-5, atol=0)
    assert relative_error(deferred.materialize(), rms_norm(truth, norm)) < TOLERANCE[dtype]
    none, alone = small_linear_add(x, weight, bias, residual, tile)
    assert none is None
    assert torch.equal(alone, total)
    assert not arrival_counters(x.device).any()


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64."""
    return F.rms_norm(x, weight.shape, weight.double(), EPS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tile", "rows", "columns"),
    [
        (SmallTile(32, 64, 4, 3), 1, 64),
        (SmallTile(32, 64, 4, 3), 5, 96),
        (SmallTile(32, 64, 4, 3), 17, 70),  # the last tile of columns is not full
        (SmallTile(16, 64, 4, 3, splits=2), 3, 48),
        (SmallTile(32, 32, 4, 3, splits=8), 33, 40),
    ],
)
def test_against_float64(dtype: torch.dtype, tile: SmallTile, rows: int, columns: int) -> None:
    check(tile, rows, columns, 256, dtype, DEVICE)


def test_rows_of_a_wider_tensor() -> None:
    x, weight, _ = tensors(4, 64, 128, torch.float32)
    wide = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, :128]
    out = small_linear(wide, weight, None, SmallTile(32, 64, 4, 3))
    assert relative_error(out, F.linear(x.double(), weight.double())) < 2e-6


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_chain_of_products(monkeypatch: pytest.MonkeyPatch, is_deferred: bool) -> None:
    """As in a layer: added to the residual and normed, then gated; deferred or not, as without the kernels."""
    monkeypatch.setattr(triton_small, "may_defer_norm", lambda *_: is_deferred)
    x, weight, bias = tensors(3, 128, 256, torch.float16)
    residual = torch.randn(2, 3, 128, dtype=torch.float16, device=DEVICE)
    norm = torch.randn(128, dtype=torch.float16, device=DEVICE)
    gate_up = torch.randn(64, 128, dtype=torch.float16, device=DEVICE) / 11
    expected, expected_total = reference.OPS.linear_add_norm(x, weight, bias, residual[0], norm, EPS, True)
    normed, total = triton_small.linear_add_norm(x, weight, bias, residual[0], norm, EPS, True)
    assert isinstance(normed, DeferredNorm) == is_deferred
    torch.testing.assert_close(total, expected_total, rtol=2e-3, atol=2e-3)
    calls: list[tuple[str, list[GatedActivation]]] = [
        ("linear", []),
        *(("gated_linear", [activation]) for activation in get_args(GatedActivation)),
    ]
    for name, last in calls:
        truth = getattr(reference.OPS, name)(expected, gate_up, None, *last)
        for ops in (triton_small.OPS, reference.OPS):
            torch.testing.assert_close(getattr(ops, name)(normed, gate_up, None, *last), truth, rtol=1e-2, atol=1e-2)
    normed, _ = triton_small.linear_add_norm(x, weight, bias, residual[0], norm, EPS, False)
    assert isinstance(normed, torch.Tensor)
    torch.testing.assert_close(normed, expected, rtol=5e-3, atol=5e-3)


def test_sizes_that_no_tile_divides_go_to_the_library() -> None:
    x, weight, bias = tensors(4, 96, 100, torch.float16)
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(triton_small.linear(x, weight, bias), expected)
    deferred = DeferredNorm(x, torch.full((4, 2), 50.0, device=DEVICE), 0.0)
    torch.testing.assert_close(triton_small.linear(deferred, weight, bias), expected)
    normed, total = triton_small.linear_add_norm(x, weight, bias, expected, bias, EPS, True)
    torch.testing.assert_close(total, 2 * expected)
    torch.testing.assert_close(normed, F.rms_norm(total, (96,), bias, EPS), rtol=5e-3, atol=5e-3)


def test_a_product_in_smaller_stages() -> None:
    x, weight, bias = tensors(3, 96, 192, torch.float16)
    tile = deferred_tile(3, 96, 192)
    assert tile is not None
    out = small_linear(DeferredNorm(x, x.float().square().sum(1, keepdim=True), EPS), weight, bias, tile)
    truth = F.linear(rms_norm(x.double(), torch.ones(192, device=DEVICE)), weight.double(), bias.double())
    assert relative_error(out, truth) < TOLERANCE[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 32, 48, 64, 100])
def test_on_a_gpu(dtype: torch.dtype, rows: int) -> None:
    for columns, size in ((4096, 4096), (1000, 512), (1024, 3072)):
        tile = split_tile(rows, columns, size)
        assert tile is not None
        check(tile, rows, columns, size, dtype, "cuda")
    check(SmallTile(64, 128, 4, 3), rows, 6144, 1024, dtype, "cuda")
    x, weight, _ = tensors(rows, 2 * 14336, 512, dtype, "cuda")
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    assert relative_error(triton_small.gated_linear(x, weight, None, "silu"), F.silu(gate) * up) < TOLERANCE[dtype]
    x, weight, _ = tensors(rows, 151_936, 256, dtype, "cuda")
    assert relative_error(triton_small.linear(x, weight, None), F.linear(x.double(), weight.double())) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_whoever_comes_last_the_bits_are_the_same(rows: int) -> None:
    """Launch after launch with the same counters, other shares in the same memory in between."""
    weight = tensors(rows, 1024, 3072, torch.bfloat16, "cuda")[1]
    inputs = [torch.randn(rows, 3072, device="cuda").bfloat16() for _ in range(3)]
    residual, norm = torch.randn(rows, 1024, device="cuda").bfloat16(), torch.randn(1024, device="cuda").bfloat16()
    tile = split_tile(rows, *weight.shape)
    assert tile is not None

    def run(x: torch.Tensor) -> torch.Tensor:
        deferred, total = small_linear_add(x, weight, None, residual, tile, (norm, EPS))
        assert deferred is not None
        return torch.cat((deferred.rows.float(), total.float(), deferred.squares), dim=1)

    firsts = [run(x) for x in inputs]
    for i in range(300):
        assert torch.equal(run(inputs[i % 3]), firsts[i % 3]), i
    assert not arrival_counters(weight.device).any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
def test_one_column_on_a_gpu(rows: int) -> None:
    """As the gate of a shared expert has: a compiled kernel takes a size of 1 for a constant."""
    x, weight, _ = tensors(rows, 1, 2048, torch.bfloat16, "cuda")
    deferred = DeferredNorm(x, x.double().square().unflatten(1, (8, -1)).sum(2).float(), EPS)
    truth = F.linear(rms_norm(x.double(), torch.ones(2048, device="cuda")), weight.double())
    assert relative_error(triton_small.linear(deferred, weight, None), truth) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("activation", ["relu2", "gelu"])
@pytest.mark.parametrize("rows", [0, 3, 300])
def test_an_activation_follows_a_product(rows: int, activation: PlainActivation) -> None:
    """In its launch where rows are few and their norm is deferred, else in one behind it."""
    dtype, act = torch.float16, ACTIVATIONS[activation]
    x, weight, bias = tensors(rows, 1100, 256, dtype)
    norm = torch.ones(256, device=DEVICE)
    deferred = DeferredNorm(x, x.float().square().sum(1, keepdim=True), EPS)
    for given, true_rows in ((x, x.double()), (deferred, rms_norm(x.double(), norm.double()))):
        found = activated_linear(given, weight, bias, activation)
        truth = act(F.linear(true_rows, weight.double(), bias.double()))
        assert found.shape == truth.shape
        assert not rows or relative_error(found, truth) < 2 * TOLERANCE[dtype]
