"""Products of many rows with quantized activations on a GPU, of which the weights choose; elsewhere plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from app.kernels.gemm import PackedWeight, QuantizedNorm, materialize, triton_packed_ops
from app.kernels.gemm import triton_quantized as ours
from app.kernels.gemm.fp8 import Fp8Weight
from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.tiled import TiledWeight
from app.kernels.gemm.triton_quantize import add_norm_quantize
from app.quantization.rounding import to_fp8_blocks, to_fp8_rows, to_int8_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


MAKE: dict[type[TiledWeight], Callable[[torch.Tensor], PackedWeight | None]] = {
    Fp8Weight: lambda weight: to_fp8_rows(weight).pack(),
    Int8Weight: lambda weight: to_int8_rows(weight).pack(),
    Fp8BlockWeight: lambda weight: to_fp8_blocks(weight, (128, 128)).pack(),
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(
    ("rows", "columns", "size"),
    [
        (3, 256, 384),
        (70, 208, 300),
        (130, 1040, 1024),
        pytest.param(1090, 5888 + 24, 300, marks=pytest.mark.gpu),
        pytest.param(3000, 4096, 2000, marks=pytest.mark.gpu),
    ],
)
def test_against_float64(kind: type[TiledWeight], rows: int, columns: int, size: int) -> None:
    torch.manual_seed(rows)
    weight = MAKE[kind](torch.randn(columns, size, device=DEVICE))
    assert isinstance(weight, kind)
    x = (torch.randn(rows, size) * torch.logspace(-2, 2, rows)[:, None]).to(DEVICE, torch.bfloat16)
    bias = torch.randn(columns).to(DEVICE, torch.bfloat16)
    truth = x.double() @ weight.dequantize().double().T + bias.double()
    out = weight.linear(x, bias).double()
    assert out.shape == truth.shape
    errors = (out - truth).norm(dim=1) / truth.norm(dim=1)  # of each row: it has scales of its own
    assert float(errors.max()) < (0.03 if kind is Int8Weight else 0.06)


def test_a_zero_of_activations_is_taken_away() -> None:
    weight = torch.randint(-128, 128, (64, 256), dtype=torch.int8, device=DEVICE)
    packed = Int8Weight.of(weight, torch.ones(64, 1, device=DEVICE), *torch.tensor([0.02, -50.0], device=DEVICE))
    x = torch.rand(70, 256).to(DEVICE, torch.bfloat16) * 3
    truth = x.double() @ weight.double().T
    out = packed.linear(x, torch.zeros(64, device=DEVICE, dtype=x.dtype)).double()
    assert float((out - truth).norm() / truth.norm()) < 0.02


@pytest.mark.parametrize(("size", "is_taken"), [(128, False), (384, False), (512, True), (640, False), (4096, True)])
def test_rows_of_scales_that_would_be_padded_go_elsewhere(size: int, is_taken: bool) -> None:
    weight = MAKE[Fp8BlockWeight](torch.ones(256, size))
    assert isinstance(weight, Fp8BlockWeight)
    assert ours._cublas_takes(weight) == is_taken
    assert weight.scales.is_contiguous()
    assert (weight.scales.shape[1] == -(-size // 128)) == is_taken


DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter rounds wrongly to bf16


def sums(rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A product, a residual and a norm's weight."""
    torch.manual_seed(rows)
    x, residual = (torch.randn(rows, size).to(DEVICE, DTYPE) for _ in range(2))
    return x, residual, torch.randn(size).to(DEVICE, DTYPE)


def made(kind: type[TiledWeight], columns: int, size: int) -> TiledWeight:
    weight = MAKE[kind](torch.randn(columns, size, device=DEVICE))
    assert isinstance(weight, kind)
    return weight


@pytest.mark.parametrize("kind", [Int8Weight, *(pytest.param(one, marks=pytest.mark.gpu) for one in list(MAKE)[::2])])
def test_products_of_a_norm_as_numbers(kind: type[TiledWeight]) -> None:
    weight = made(kind, 256, 512)
    numbers = ours.numbers_of(weight)
    assert numbers is not None
    normed, _ = add_norm_quantize(*sums(70, 512), 1e-5, numbers)
    found, truth = weight.linear(normed, None).double(), weight.linear(normed.materialize(), None).double()
    assert float((found - truth).norm() / truth.norm()) < 2e-2  # a norm may round otherwise, and a number with it


def test_a_reader_of_another_kind_has_the_norm_itself() -> None:
    normed, _ = add_norm_quantize(*sums(5, 512), 1e-5, ours.INT8)
    codes, scale = torch.ones(64, 512, dtype=torch.int8, device=DEVICE), torch.ones(64, 1, device=DEVICE)
    given = Int8Weight.of(codes, scale, torch.tensor(0.02, device=DEVICE))
    assert ours.numbers_of(given) is None
    assert torch.equal(given.linear(normed, None), given.linear(normed.materialize(), None))
    assert ours.numbers_of(made(Fp8BlockWeight, 256, 384)) is None  # whose products cuBLAS does not take


def test_what_follows_a_product_of_many_rows_is_numbers_where_one_product_reads_it() -> None:
    ops = triton_packed_ops.OPS
    assert ops.linear_add_numbers is not None
    back, forth = made(Int8Weight, 512, 384), made(Int8Weight, 256, 512)
    for rows, are_numbers in ((3, False), (130, True)):
        _, residual, norm = sums(rows, 512)
        x = torch.randn(rows, 384).to(DEVICE, DTYPE)
        plain, total = ops.linear_add_norm(x, back, None, residual, norm, 1e-5, True)
        found, found_total = ops.linear_add_numbers(x, back, None, residual, norm, 1e-5, True)
        assert isinstance(found, QuantizedNorm) == are_numbers
        assert torch.equal(found_total, total)
        truth = ops.linear(plain, forth, None)
        torch.testing.assert_close(ops.linear(found, forth, None), truth, rtol=2e-2, atol=0.5)
        gated, truth = (materialize(ops.gated_linear(one, forth, None, "silu")) for one in (found, plain))
        torch.testing.assert_close(gated, truth, rtol=3e-2, atol=float(truth.abs().max()) / 100)
