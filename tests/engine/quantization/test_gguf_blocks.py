"""Each type of GGUF's blocks against the `gguf` package, for random bytes."""

from __future__ import annotations

import gguf
import pytest
import torch

from app.engine.gguf.blocks import BLOCK_TYPES, PLAIN
from app.engine.quantization.gguf_blocks import UNPACK, unpack_blocks
from tests.gguf_models import random_blocks


def test_every_quantized_type_is_read() -> None:
    assert UNPACK.keys() == BLOCK_TYPES.keys() - PLAIN


@pytest.mark.parametrize("name", sorted(UNPACK))
def test_numbers_are_those_of_the_gguf_package(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert (BLOCK_TYPES[name].size, BLOCK_TYPES[name].num_bytes) == (size, num_bytes)
    raw = random_blocks(name, (5, 3 * size))
    found = unpack_blocks(name, torch.from_numpy(raw).view(5, 3, num_bytes))
    assert int(found.codes.max()) < 1 << found.bits
    expected = torch.from_numpy(gguf.dequantize(raw, kind))
    torch.testing.assert_close(found.numbers(), expected, rtol=1e-6, atol=1e-7)
