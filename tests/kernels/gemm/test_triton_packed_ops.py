"""Products of few rows with packed weights in Triton against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm import DeferredActivation, DeferredNorm, materialize, triton_packed_ops, triton_small
from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.triton_dequantize import dequantized
from app.kernels.gemm.triton_packed_ops import PackedTile, StreamedTile, packed_linear, tile_for
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.gemm.wide import WideTile, serves, wide_tile
from app.kernels.kernel_table import HOPPER
from tests.kernels.gemm.tiled_weights import KINDS, Made, blocks_of_fp8, grouped, rows_of_int8

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if ON_GPU else [torch.float32]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5}
EPS = 1e-5
# Tiles of two shares of the inputs and of one; the interpreter cannot run Gluon.
TILES = {"triton": (PackedTile(64 if ON_GPU else 32, splits=2), PackedTile(64 if ON_GPU else 32))} | (
    {"gluon": (StreamedTile(32, 8, 4), StreamedTile(64, 4, 1, 16, 2))} if ON_GPU else {}
)
IS_HOPPER = ON_GPU and HOPPER.are_met(torch.device("cuda"))
if IS_HOPPER:
    TILES["wide"] = (WideTile(64, 3, splits=2), WideTile(128, 3))
# Of a size whose rows the copy engine finds, which others are not.
ALIGNED: dict[str, Callable[[str], Made]] = {
    "4 bits, zeros": lambda device: grouped(72, 304, 128, 4, is_zero_based=True, device=device),
    "int8": lambda device: rows_of_int8(72, 304, device),
    "fp8 blocks": lambda device: blocks_of_fp8(200, 304, (128, 128), device),
}
READ = [name for name in KINDS if "24" not in name and "order" not in name]  # by kernels


def made(name: str, kinds: dict[str, Callable[[str], Made]] = KINDS) -> Made:
    torch.manual_seed(0)
    return kinds[name](DEVICE)


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    assert bool(out.isfinite().all())
    return float((out.double().cpu() - truth.cpu()).norm() / truth.norm())


@pytest.mark.parametrize("kernel", TILES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", READ)
def test_products_and_what_follows_them(name: str, dtype: torch.dtype, kernel: str) -> None:
    weight = made(name)
    columns, size = weight.truth.shape
    rows = 17 if name == "4 bits" else 3
    wide = torch.randn(rows, size + 8).to(DEVICE, dtype)
    wide[:, size:] = float("nan")  # of another tensor
    x, bias = wide[:, :size], torch.randn(columns).to(DEVICE, dtype)
    truth = F.linear(x.double().cpu(), weight.truth, bias.double().cpu())
    (split, tile), stored = TILES[kernel], weight.weight.stored
    if kernel == "gluon" and stored.scales.dtype == torch.int32:
        pytest.skip("exponents are read by the kernel in Triton")
    if kernel == "wide" and not serves(stored):
        pytest.skip("not its form")
    assert relative_error(packed_linear(x, stored, bias, tile)[0], truth) < TOLERANCE[dtype]
    residual, norm = torch.randn(rows, columns).to(DEVICE, dtype), torch.randn(columns).to(DEVICE, dtype)
    total, deferred = packed_linear(x, stored, bias, split, residual=residual, norm=(norm, EPS))
    truth += residual.double().cpu()
    assert relative_error(total, truth) < TOLERANCE[dtype]
    assert deferred is not None
    assert torch.equal(deferred.rows, total * norm)
    assert (
        relative_error(deferred.materialize(), F.rms_norm(truth, (columns,), norm.double().cpu(), EPS))
        < TOLERANCE[dtype]
    )
    assert not arrival_counters(x.device).any()


@pytest.mark.parametrize("kernel", TILES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALIGNED)
@pytest.mark.parametrize("splits", [1, 2])
def test_gate_and_up_of_rows_with_a_deferred_norm(name: str, dtype: torch.dtype, splits: int, kernel: str) -> None:
    weight = made(name, ALIGNED if kernel == "wide" else KINDS)
    assert kernel != "wide" or serves(weight.weight.stored)
    columns, size = weight.truth.shape
    x, bias = torch.randn(3, size).to(DEVICE, dtype) / 16, torch.randn(columns).to(DEVICE, dtype)
    deferred = DeferredNorm(x, x.double().square().unflatten(1, (4, -1)).sum(2).float(), EPS)
    truth = F.linear(F.rms_norm(x.double().cpu(), (size,), None, EPS), weight.truth, bias.double().cpu())
    gate, up = truth.chunk(2, dim=1)
    tile = replace(TILES[kernel][2 - splits], height=16 if kernel == "wide" else 8)
    out, _ = packed_linear(deferred, weight.weight.stored, bias, tile, activation="silu")
    assert relative_error(out, F.silu(gate) * up) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("name", KINDS)
def test_dequantized_rows(name: str) -> None:
    weight = made(name).weight.stored
    out = dequantized(weight, 5, 60, torch.float32)
    torch.testing.assert_close(out, weight.dequantize(5, 60), rtol=1e-6, atol=1e-6)


def test_the_order_of_inputs_and_sizes_that_no_kernel_reads() -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    for name in ("act-order", "4 bits, groups of 24"):
        weight = made(name)
        x = torch.randn(3, weight.truth.shape[1]).to(DEVICE, dtype)
        squares = x.float().square().sum(1, keepdim=True)
        truth = F.rms_norm(x.double().cpu(), (x.shape[1],), None, EPS) @ weight.truth.T
        for given in (DeferredNorm(x, squares, EPS), F.rms_norm(x, (x.shape[1],), None, EPS)):
            assert relative_error(triton_packed_ops.linear(given, weight.weight, None), truth) < 2e-2
    assert tile_for(3, weight.weight.stored) is None


def test_more_rows_than_a_tile_has() -> None:
    weight = made("4 bits")
    rows, columns = 70, len(weight.truth)
    x = torch.randn(rows, weight.weight.stored.size).to(DEVICE, torch.float16)
    residual, norm = torch.randn(rows, columns).to(DEVICE, x.dtype), torch.randn(columns).to(DEVICE, x.dtype)
    normed, total = triton_packed_ops.linear_add_norm(x, weight.weight, None, residual, norm, EPS, True)
    truth = x.double().cpu() @ weight.truth.T + residual.double().cpu()
    assert relative_error(total, truth) < 2e-3
    assert relative_error(materialize(normed), F.rms_norm(truth, (columns,), norm.double().cpu(), EPS)) < 5e-3
    tile = tile_for(rows, weight.weight.stored)
    assert tile is not None
    assert tile.height < rows


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("name", ["4 bits, zeros", "int8", "fp8 blocks"])
def test_an_activation_that_is_left_to_the_reader(name: str, rows: int) -> None:
    weight, dtype = made(name), torch.bfloat16 if ON_GPU else torch.float32
    columns, size = weight.truth.shape
    gate_up = torch.randn(rows, 2 * size).to(DEVICE, dtype)
    gate, up = gate_up.double().cpu().chunk(2, dim=1)
    truth = (F.silu(gate) * up) @ weight.truth.T
    given, residual = DeferredActivation(gate_up, "silu"), torch.ones(rows, columns, device=DEVICE, dtype=dtype)
    out = triton_packed_ops.linear(given, weight.weight, None)
    assert relative_error(out, truth) < 0.05
    normed, total = triton_packed_ops.linear_add_norm(given, weight.weight, None, residual, residual[0], EPS, True)
    torch.testing.assert_close(total, out + residual)
    assert relative_error(materialize(normed), F.rms_norm(total.double().cpu(), (columns,), None, EPS)) < 1e-2
    plain = weight.truth.to(DEVICE, dtype)
    assert relative_error(triton_small.linear(given, plain, None), truth) < 1e-2
    assert (
        relative_error(triton_small.linear_add_norm(given, plain, None, 0 * residual, residual[0], EPS, True)[1], truth)
        < 1e-2
    )


def test_many_rows_leave_the_activation_to_their_reader() -> None:
    weight = made("int8")
    x = torch.randn(70, weight.weight.stored.size).to(DEVICE, torch.bfloat16 if ON_GPU else torch.float32)
    gated = triton_packed_ops.gated_linear(x, weight.weight, None, "silu")
    assert isinstance(gated, DeferredActivation)
    gate, up = (x.double().cpu() @ weight.truth.T).chunk(2, dim=1)
    assert relative_error(materialize(gated), F.silu(gate) * up) < 0.05


def test_a_row_alone_and_in_a_batch() -> None:
    weight = made("4 bits, zeros").weight.stored
    x = torch.randn(20, weight.size).to(DEVICE, torch.float32)
    for tile, given in ((PackedTile(64 if ON_GPU else 32, splits=2), x), (StreamedTile(16, 8, 8), x.half())):
        if isinstance(tile, PackedTile) or ON_GPU:
            together, _ = packed_linear(given, weight, None, tile)
            for row in (0, 19):
                assert torch.equal(packed_linear(given[row : row + 1], weight, None, tile)[0][0], together[row])


@pytest.mark.skipif(not IS_HOPPER, reason="written for Hopper GPUs")
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 200, 300])
@pytest.mark.parametrize("is_zero_based", [False, True])
def test_some_hundred_rows(rows: int, is_zero_based: bool) -> None:
    torch.manual_seed(rows)
    q = torch.randint(16, (1232, 1048), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(1232, 9, device=DEVICE).half() / 64
    weight = GroupWeight.of(q, scale, -7.3 * scale if is_zero_based else None, 4, None, torch.bfloat16, group=128)
    x = torch.randn(rows, 1048, device=DEVICE).bfloat16()
    residual, norm = torch.randn(rows, 1232, device=DEVICE).bfloat16(), torch.rand(1232, device=DEVICE).bfloat16()
    chosen = wide_tile(rows, weight.stored)
    assert chosen is not None
    assert chosen == tile_for(rows, weight.stored)
    product = x.double() @ weight.dequantize().double().t()
    gate, up = product.chunk(2, dim=1)
    for tile in (chosen, WideTile(64, 4, 3), WideTile(256, 2, 2)):
        gated, _ = packed_linear(x, weight.stored, None, tile, activation="silu")
        assert relative_error(gated, (F.silu(gate) * up).cpu()) < TOLERANCE[x.dtype]
        total, deferred = packed_linear(x, weight.stored, None, tile, residual=residual, norm=(norm, EPS))
        assert relative_error(total, (product + residual.double()).cpu()) < TOLERANCE[x.dtype]
        assert deferred is not None
        torch.testing.assert_close(deferred.squares.sum(1), total.float().square().sum(1), rtol=1e-4, atol=1e-3)
        again, _ = packed_linear(x, weight.stored, None, tile, residual=residual, norm=(norm, EPS))
        assert torch.equal(total, again)
        assert not arrival_counters(x.device).any()


@pytest.mark.parametrize("name", ["4 bits, zeros", "4 bits, groups of 32", "int8"])
def test_weights_multiplied_by_their_scales(name: str) -> None:
    weight = made(name)
    x = torch.randn(40, weight.weight.stored.size).to(DEVICE, DTYPES[0])
    tile = PackedTile(64 if ON_GPU else 32, height=32, is_wide=True)
    out, _ = packed_linear(x, weight.weight.stored, None, tile)
    assert relative_error(out, x.double().cpu() @ weight.truth.T) < 2 * TOLERANCE[DTYPES[0]]


@pytest.mark.parametrize("name", ["fp8 blocks", "4 bits", "act-order"])
def test_a_product_beside_the_one_before_has_the_same_bits(name: str) -> None:
    weight, ops = made(name), triton_packed_ops.OPS
    x = torch.randn(3, weight.truth.shape[1]).to(DEVICE, DTYPES[0] if ON_GPU else torch.float16)
    deferred, beside = DeferredNorm(x, x.float().square().sum(1, keepdim=True), EPS), ops.linear_beside
    assert beside is not None
    for _ in range(20 if ON_GPU else 1):
        for given in (deferred, x):
            before = triton_small.linear(given, torch.ones(16, x.shape[1], dtype=x.dtype, device=DEVICE), None)
            assert torch.equal(beside(given, weight.weight, None), ops.linear(given, weight.weight, None))
            assert bool(before.isfinite().all())
