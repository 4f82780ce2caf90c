"""Weights side by side: one product each, as the whole would give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm.fp8 import Fp8Weight
from app.kernels.gemm.parts import PackedParts, UnpackedWeight


@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_that_of_the_whole(bias: bool) -> None:
    first, second, x = torch.randn(5, 12), torch.randn(16, 12), torch.randn(3, 12)
    b = torch.randn(21) if bias else None
    parts = PackedParts((UnpackedWeight(first), UnpackedWeight(second)), (5, 16))
    torch.testing.assert_close(parts.linear(x, b), F.linear(x, torch.cat((first, second)), b))
    fp8 = Fp8Weight.quantize(second)
    unlike = PackedParts((UnpackedWeight(first), fp8), (5, 16)).linear(x, b)
    expected = torch.cat((F.linear(x, first), fp8.linear(x, None)), 1) + (0 if b is None else b)
    torch.testing.assert_close(unlike, expected)
