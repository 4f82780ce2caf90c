"""Codes come out of their words as compressed-tensors puts them in."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from app.quantization.bits import unpack_bits, words_of


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", [7, 32, 45, 96])
def test_codes(bits: int, size: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, size), dtype=torch.int32)
    words = pack_to_int32((codes - (1 << (bits - 1))).to(torch.int8), bits)
    per, entries = words_of(bits)
    assert words.shape[1] == -(-size * entries // per)
    assert torch.equal(unpack_bits(words, bits)[:, :size].int(), codes)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1), (2, 5)])
def test_words_may_lie_in_any_order(bits: int, shape: tuple[int, int]) -> None:
    """Of a rank that holds one word of inputs, the words are a row that was turned."""
    words = torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32)
    assert torch.equal(unpack_bits(words.t(), bits), unpack_bits(words.t().clone().contiguous(), bits))
    assert torch.equal(unpack_bits(words.t(), bits), torch.stack([unpack_bits(row, bits) for row in words.t()]))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes_hold_codes_as_words_do(bits: int) -> None:
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (3, 4), dtype=torch.int32)
    assert torch.equal(unpack_bits(words.view(torch.uint8), bits), unpack_bits(words, bits))
    assert unpack_bits(words.view(torch.uint8)[:, :1], bits).shape == (3, 8 // bits)
