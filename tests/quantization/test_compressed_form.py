"""What is stored in compressed-tensors' form is, to that library, what our forms dequantize to."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from app.quantization.compressed_form import compressed_form, scheme
from app.quantization.compressed_tensors import CompressedTensors

NAMES = ("fp8", "fp8_block", "int8", "w4")


@pytest.mark.parametrize("name", NAMES)
def test_the_library_reads_the_same_numbers(name: str) -> None:
    form, weight = compressed_form(name), torch.randn(160, 256)
    library = BaseCompressor.get_value_from_registry(form.format)
    read = library.decompress(form.tensors(weight), QuantizationScheme(**form.group()))["weight"]
    assert torch.equal(read, form.round(weight).dequantize())
    assert 0 < float((read - weight).abs().max()) < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_is_one_of_the_librarys_and_ours(name: str) -> None:
    described = scheme(compressed_form(name, 64), ["lm_head"], "attn_head")
    read = QuantizationConfig.model_validate(described)
    assert read.ignore == ["lm_head"]
    assert read.kv_cache_scheme is not None
    assert read.kv_cache_scheme.strategy == "attn_head"
    assert isinstance(CompressedTensors.of_checkpoint(described), CompressedTensors)


def test_sizes_that_not_everybody_reads() -> None:
    assert not compressed_form("w4").fits([64], 192)
    assert compressed_form("w4", 64).fits([5], 192)
    assert not compressed_form("fp8").fits([24], 32)
    assert not compressed_form("fp8_block").fits([256, 64, 64], 128)  # q, k and v in one tensor
    assert compressed_form("fp8_block").fits([64], 128)
    assert compressed_form("int8").fits([5], 7)
