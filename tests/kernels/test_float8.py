"""Wider numbers out of e4m3 against the definition."""

from __future__ import annotations

import math

import pytest
import torch

from app.kernels.float8 import widened


def number(code: int) -> float:
    """What a byte of e4m3 means."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_all_numbers(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for given in (codes, codes[codes % 128 != 127], codes.view(16, 16).t()[3:, 1:], codes[:0]):
        expected = torch.tensor([number(code) for code in given.flatten().tolist()], dtype=dtype).view(given.shape)
        out = widened(given.view(torch.float8_e4m3fn), dtype)
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(out.nan_to_num().signbit(), expected.nan_to_num().signbit())
