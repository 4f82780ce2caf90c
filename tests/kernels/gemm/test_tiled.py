"""Packed weights of few bits on a CPU: what they hold, and their products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm import tiled
from app.kernels.gemm.fp8_block import quantize_groups
from app.kernels.gemm.group import GroupWeight
from app.kernels.gemm.int8 import Int8Weight, quantize_rows
from app.kernels.gemm.stored import Form, bits_of, code_bits, pack_words, unpack_words
from tests.kernels.gemm.tiled_weights import KINDS, Made, rows_of_int8


def made(name: str) -> Made:
    torch.manual_seed(0)
    return KINDS[name]("cpu")


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_is_worth_what_it_was_made_of(name: str) -> None:
    weight = made(name)
    assert weight.weight.shape == weight.truth.shape
    torch.testing.assert_close(weight.weight.dequantize().double(), weight.truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in KINDS if "8" not in name])
def test_products_with_activations_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "_ELEMENTS", {"cpu": 4096})  # some rows at a time
    weight, bias = made(name), torch.randn(len(made(name).truth))
    for rows in (0, 1, 5):
        x = torch.randn(rows, weight.truth.shape[1])
        truth = F.linear(x.double(), weight.truth, bias.double())
        torch.testing.assert_close(weight.weight.linear(x, bias).double(), truth, rtol=1e-4, atol=1e-4)
    assert weight.weight.ops_on(torch.device("cpu")) is None  # what follows is a launch of its own


def test_4_bits_are_half_a_byte() -> None:
    weight = made("4 bits").weight.stored
    assert weight.words.numel() * weight.words.element_size() == 72 * 384 // 2
    assert weight.offsets is None
    for bits in (3, 4):
        q, scale = torch.randint(1 << bits, (8, 128), dtype=torch.uint8), torch.rand(8, 1).half()
        made_of = GroupWeight.of(q, scale, -(1 << (bits - 1)) * scale, bits, None, torch.float16)
        assert made_of.stored.offsets is None, "zeros in the middle"
        torch.testing.assert_close(made_of.dequantize(), (q.float() - (1 << (bits - 1))) * scale.float())


@pytest.mark.parametrize("form", ["nibble", "int8", "e2m1"])
def test_words_hold_a_block_in_parts(form: Form) -> None:
    bits = bits_of(form)
    codes = torch.randint(1 << bits, (3, 200), dtype=torch.uint8)
    words = pack_words(codes, form, 64)
    assert torch.equal(unpack_words(words, form, 64, 200), codes)
    run, first = 64 * bits // 16, int(words[1, 2]) & 0xFFFF
    found = [sum((first >> bit & 1) << i for i, bit in enumerate(code_bits(form, part))) for part in range(16 // bits)]
    assert found == codes[1, 2:64:run].tolist()


def test_int8_products_are_of_quantized_activations() -> None:
    torch.manual_seed(0)
    weight, x = rows_of_int8(72, 300), torch.randn(4, 300) * torch.logspace(-3, 3, 4)[:, None]
    x[1] = 0.0
    scale = (x.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12).double()
    truth = (x.double() / scale).round() * scale @ weight.truth.T
    out = weight.weight.linear(x, None).double()
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))
    plain = x.double() @ weight.truth.T
    assert 1e-4 < float((out - plain).norm() / plain.norm()) < 0.02, "quantized, but not spoiled"


def test_int8_with_a_scale_and_a_zero_for_activations() -> None:
    weight = torch.randint(-128, 128, (16, 64), dtype=torch.int8)
    packed = Int8Weight.of(weight, torch.ones(16, 1), torch.tensor(0.05), torch.tensor(-20))
    x = torch.rand(3, 64) * 6  # 0 .. 6 -> -20 .. 100
    codes = (x / torch.tensor(0.05) - 20).round()
    torch.testing.assert_close(packed.linear(x, None), (codes + 20) * 0.05 @ weight.float().T, rtol=1e-4, atol=1e-2)
    beyond = quantize_rows(torch.full((1, 2), 99.0), torch.tensor(0.05), torch.tensor(-20))[0]
    assert beyond.tolist() == [[147.0, 147.0]], "127 less the zero"


def test_fp8_blocks_quantize_activations_in_groups() -> None:
    x = torch.randn(3, 300)
    x[:, 128:256] *= 1000
    quantized, scale = quantize_groups(x, 128)
    assert quantized.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(scale[:, 2], x[:, 256:].abs().amax(1) / 448)
    error = (quantized.float() * scale.repeat_interleave(128, 1)[:, :300] - x).abs()
    assert bool((error[:, :128] <= x[:, :128].abs() / 16 + 1e-2).all()), "its own scale"
