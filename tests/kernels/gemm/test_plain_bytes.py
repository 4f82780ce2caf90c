"""Weights of a byte each on a CPU: plain numbers in bf16, as they were otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm import onednn
from app.kernels.gemm.fp8 import Fp8Weight, quantize_rows
from app.kernels.gemm.fp8_block import Fp8BlockWeight, Fp8OnlyWeight, quantize_groups
from app.kernels.gemm.onednn import OneDNNWeight
from app.kernels.gemm.plain_bytes import RoundedInputs
from app.kernels.gemm.stored import StoredTiles
from app.kernels.gemm.tiled import fastest
from tests.kernels.gemm.tiled_weights import blocks_of_fp8, grouped

BF16 = torch.bfloat16
needs_bf16 = pytest.mark.skipif(not onednn.works(BF16), reason="no products of bf16 here")


def expect_product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Up to rounding: that of the weight and of the result."""
    truth = F.linear(x.double(), weight.to(BF16).double(), bias.double())
    torch.testing.assert_close(out.double(), truth, rtol=1e-2, atol=5e-3 * float(truth.abs().max()) if len(x) else 0)


@needs_bf16
@pytest.mark.parametrize("is_ordered", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("is_zero_based", [False, True], ids=["symmetric", "zeros"])
def test_groups_of_16(is_zero_based: bool, is_ordered: bool) -> None:
    torch.manual_seed(0)
    made = grouped(512, 528, 16, 6, is_zero_based=is_zero_based, is_ordered=is_ordered)
    packed, bias = fastest(made.weight, BF16), torch.randn(512).to(BF16)
    assert isinstance(packed, OneDNNWeight)
    for rows in (0, 1, 5, 70):
        x = torch.randn(rows, 528).to(BF16)
        expect_product(packed.linear(x, bias), x, made.truth, bias)


@needs_bf16
@pytest.mark.parametrize("input_scale", [None, 0.01], ids=["a scale a row", "one scale"])
@pytest.mark.parametrize("most", [None, 2.0])
def test_fp8_with_rounded_inputs(input_scale: float | None, most: float | None) -> None:
    torch.manual_seed(0)
    codes, scale = quantize_rows(torch.randn(512, 520))
    given = None if input_scale is None else torch.tensor(input_scale)
    packed, bias = fastest(Fp8Weight.of(codes, scale, given, most), BF16), torch.randn(512).to(BF16)
    assert isinstance(packed, RoundedInputs)
    for rows in (0, 1, 5):
        x = torch.randn(rows, 520).to(BF16) * 2
        cut = x if most is None else x.clamp(-most, most)
        numbers, scales = quantize_rows(cut, given)
        expect_product(packed.linear(x, bias), numbers.float() * scales, codes.float() * scale, bias)


@needs_bf16
def test_few_numbers_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made, dequantize = list[int](), StoredTiles.dequantize

    def noted(stored: StoredTiles, start: int = 0, stop: int | None = None) -> torch.Tensor:
        numbers = dequantize(stored, start, stop)
        made.append(numbers.numel())
        return numbers

    torch.manual_seed(0)
    codes, scale = quantize_rows(torch.randn(2048, 1040))
    monkeypatch.setattr(StoredTiles, "dequantize", noted)
    packed, bias = fastest(Fp8OnlyWeight.of(codes, scale, (1, 1040)), BF16), torch.randn(2048).to(BF16)
    assert sum(made) == codes.numel()
    assert max(made) <= 1 << 20
    x = torch.randn(3, 1040).to(BF16)
    expect_product(packed.linear(x, bias), x, codes.float() * scale, bias)


@needs_bf16
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_fp8_in_blocks(rounds_inputs: bool) -> None:
    torch.manual_seed(0)
    made = blocks_of_fp8(520, 520, (128, 128), "cpu", Fp8BlockWeight if rounds_inputs else Fp8OnlyWeight)
    packed, bias = fastest(made.weight, BF16), torch.randn(520).to(BF16)
    assert isinstance(packed, RoundedInputs) == rounds_inputs
    assert packed is not made.weight
    for rows in (0, 1, 5):
        x = torch.randn(rows, 520).to(BF16)
        left: torch.Tensor = x
        if rounds_inputs:
            numbers, scales = quantize_groups(x, 128)
            left = numbers.float() * scales.repeat_interleave(128, dim=1)[:, :520]
        expect_product(packed.linear(x, bias), left, made.truth, bias)


@pytest.mark.parametrize(
    ("columns", "group", "bits", "dtype"),
    [
        (512, 16, 6, torch.float32),  # would be more than three times as large
        (512, 24, 4, BF16),  # the same
        (64, 16, 6, BF16),  # too small to count
    ],
)
def test_others_stay_as_they_are(columns: int, group: int, bits: int, dtype: torch.dtype) -> None:
    made = grouped(columns, 528, group, bits, is_zero_based=False)
    assert fastest(made.weight, dtype) is made.weight
