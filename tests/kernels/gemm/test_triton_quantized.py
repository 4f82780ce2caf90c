"""Products of many rows with quantized activations on a GPU, of which the weights choose; elsewhere plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from app.kernels.gemm import PackedWeight
from app.kernels.gemm import triton_quantized as ours
from app.kernels.gemm.fp8 import Fp8Weight
from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.tiled import TiledWeight
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
