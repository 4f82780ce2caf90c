"""Each type of GGUF's blocks against the `gguf` package, for random bytes."""

from __future__ import annotations

import gguf
import pytest
import torch

from app.checkpoints.gguf.blocks import BLOCK_TYPES, PLAIN
from app.checkpoints.tensors.leaf import Share
from app.quantization.base import WeightShares
from app.quantization.gguf import GgufBlocks
from app.quantization.gguf_blocks import UNPACK, unpack_blocks
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
    shares = WeightShares((Share(0, 5, 0, 5),), Share(0, 3 * size, 0, 3 * size))
    stored = {"weight": torch.from_numpy(raw).view(5, 3, num_bytes)}
    numbers = GgufBlocks(torch.float32, name).unpack(stored, shares).dequantize()
    torch.testing.assert_close(numbers, expected, rtol=1e-6, atol=1e-7)
