"""Codes come out of their words as compressed-tensors puts them in."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from app.engine.quantization.bits import unpack_bits, words_of


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", [7, 32, 45, 96])
def test_codes(bits: int, size: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, size), dtype=torch.int32)
    words = pack_to_int32((codes - (1 << (bits - 1))).to(torch.int8), bits)
    per, entries = words_of(bits)
    assert words.shape[1] == -(-size * entries // per)
    assert torch.equal(unpack_bits(words, bits)[:, :size].int(), codes)
