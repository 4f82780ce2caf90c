"""Weights of more than 4 bits in groups of 16 on a CPU: plain numbers in bf16, as they were otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm import onednn
from app.kernels.gemm.onednn import OneDNNWeight
from app.kernels.gemm.tiled import fastest
from tests.kernels.gemm.tiled_weights import grouped

needs_bf16 = pytest.mark.skipif(not onednn.works(torch.bfloat16), reason="no products of bf16 here")


@needs_bf16
@pytest.mark.parametrize("is_ordered", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("is_zero_based", [False, True], ids=["symmetric", "zeros"])
def test_products_equal_those_of_the_rounded_numbers(is_zero_based: bool, is_ordered: bool) -> None:
    torch.manual_seed(0)
    made = grouped(512, 528, 16, 6, is_zero_based=is_zero_based, is_ordered=is_ordered)
    packed, bias = fastest(made.weight, torch.bfloat16), torch.randn(512).bfloat16()
    assert isinstance(packed, OneDNNWeight)
    for rows in (0, 1, 5, 70):
        x = torch.randn(rows, 528).bfloat16()
        truth = F.linear(x.double(), made.truth.bfloat16().double(), bias.double())
        torch.testing.assert_close(packed.linear(x, bias).double(), truth, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("columns", "group", "bits", "dtype"),
    [
        (512, 16, 6, torch.float32),  # would be more than three times as large
        (512, 16, 4, torch.bfloat16),  # the same
        (64, 16, 6, torch.bfloat16),  # too small to count
    ],
)
def test_others_stay_as_they_are(columns: int, group: int, bits: int, dtype: torch.dtype) -> None:
    made = grouped(columns, 512, group, bits, is_zero_based=False)
    assert fastest(made.weight, dtype) is made.weight
