"""Activations of 8 bits in Triton against plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from app.kernels.fused.triton_ops import act_and_mul, add_rms_norm
from app.kernels.gemm import DeferredActivation, NumberKind, fp8_block, int8
from app.kernels.gemm.stored import BLOCK, unpack_words
from app.kernels.gemm.triton_quantize import add_norm_quantize, quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows(num_rows: int, size: int) -> torch.Tensor:
    x = torch.randn(num_rows, size + 3, generator=torch.Generator().manual_seed(size))[:, :size]
    x[:1] = 0.0  # a row of zeros
    return x.mul(torch.logspace(-4, 4, num_rows)[:, None]).to(DEVICE)


def in_order(quantized: torch.Tensor, size: int) -> torch.Tensor:
    """Bytes [T, size] by columns."""
    return unpack_words(quantized.view(torch.int16), "int8", BLOCK, size)


@pytest.mark.parametrize(("num_rows", "size"), [(0, 16), (5, 16), (9, 300), (3, 1024)])
def test_int8_rows(num_rows: int, size: int) -> None:
    x = rows(num_rows, size)
    quantized, scale = quantize(x, "int8")
    assert quantized.shape == (num_rows, -(-size // BLOCK) * BLOCK)
    numbers, expected = int8.quantize_rows(x)
    torch.testing.assert_close(scale, expected)
    assert torch.equal(in_order(quantized, size).view(torch.int8).float(), numbers)


def test_int8_with_a_scale_and_a_zero() -> None:
    x, scale, zero = rows(4, 200) / 1e3, torch.tensor(0.04, device=DEVICE), torch.tensor(-7, device=DEVICE)
    quantized, given = quantize(x, "int8", given=scale, zero=zero)
    numbers, _ = int8.quantize_rows(x, scale, zero)
    assert torch.equal(in_order(quantized, 200).view(torch.int8).float() + 7, numbers)
    assert given.tolist() == [[scale.item()]] * 4


@pytest.mark.parametrize("size", [16, 300])
def test_an_activation_that_was_left_to_the_reader(size: int) -> None:
    gate_up = rows(5, 2 * size).clamp(-50, 50).to(torch.bfloat16)
    quantized, scale = quantize(DeferredActivation(gate_up, "silu"), "int8")
    numbers, expected = int8.quantize_rows(act_and_mul(gate_up, "silu"))
    torch.testing.assert_close(scale, expected)
    assert torch.equal(in_order(quantized, size).view(torch.int8).float(), numbers)


@pytest.mark.gpu  # the interpreter rounds wrongly to fp8
@pytest.mark.parametrize(("num_rows", "size"), [(2, 300), (3, 14336)])
@pytest.mark.parametrize("by_blocks", [False, True])
def test_an_activation_in_fp8(num_rows: int, size: int, by_blocks: bool) -> None:
    gated = DeferredActivation(rows(num_rows, 2 * size).to(torch.bfloat16), "silu")
    quantized, scale = quantize(gated, "e4m3", by_blocks=by_blocks)
    plain, expected = quantize(gated.materialize(), "e4m3", by_blocks=by_blocks)
    assert torch.equal(quantized[:num_rows].view(torch.uint8), plain[:num_rows].view(torch.uint8))
    assert torch.equal(scale[:num_rows], expected[:num_rows])


@pytest.mark.gpu  # the interpreter rounds wrongly to fp8
@pytest.mark.parametrize(("num_rows", "size"), [(1, 128), (6, 300)])
def test_fp8_blocks(num_rows: int, size: int) -> None:
    x = rows(num_rows, size)
    quantized, scale = quantize(x, "e4m3", by_blocks=True)
    bytes_, expected = fp8_block.quantize_groups(x, BLOCK)
    torch.testing.assert_close(scale[:num_rows], expected)
    assert torch.equal(in_order(quantized, size)[:num_rows], bytes_.view(torch.uint8))
    assert scale.stride(0) == 1
    assert len(scale) % 4 == 0


KINDS = [
    NumberKind("int8"),
    pytest.param(NumberKind("e4m3"), marks=pytest.mark.gpu),
    pytest.param(NumberKind("e4m3", by_blocks=True), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "size"), [(0, 16), (5, 16), (9, 300), (3, 4096)])
def test_a_norm_as_numbers_is_the_numbers_of_the_norm(num_rows: int, size: int, kind: NumberKind) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x, residual = rows(num_rows, size).to(dtype), rows(num_rows, size + 8)[:, 4:-4].to(dtype)
    weight = torch.randn(size, device=DEVICE, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    numbers, scales = quantize(normed, kind.name, by_blocks=kind.by_blocks)
    found, found_total = add_norm_quantize(x, residual, weight, 1e-5, kind)
    assert torch.equal(found_total, total)
    assert found.scales.stride() == scales.stride()
    assert (len(found), found.dtype, found.device) == (num_rows, dtype, x.device)
    each = BLOCK if kind.by_blocks else numbers.shape[1]
    expected, given = (
        n[:num_rows].float() * s[:num_rows].repeat_interleave(each, 1)
        for n, s in ((numbers, scales), (found.numbers, found.scales))
    )
    # A sum of squares in another order may round a norm otherwise, and with it a number.
    torch.testing.assert_close(given, expected, rtol=0.13, atol=float(scales[:num_rows].max()) if num_rows else 0.0)
    assert float((given - expected).norm()) <= (1e-2 if kind.name == "int8" else 3e-2) * float(expected.norm())
    torch.testing.assert_close(found.materialize(), normed, rtol=1e-2, atol=1e-2)
    if num_rows:  # as a deferred norm, for readers of those
        divided = found.rows.float() * (found.squares.sum(1, keepdim=True) / size + 1e-5).rsqrt()
        torch.testing.assert_close(divided, normed.float(), rtol=2e-2, atol=1e-2)
