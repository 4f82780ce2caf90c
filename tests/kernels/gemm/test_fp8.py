"""fp8 products against an e4m3 written out in NumPy: the CPU path, Triton, the GPU's tensor cores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.kernels.gemm import DeferredActivation, fp8
from app.kernels.gemm.fp8 import Fp8Weight

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def e4m3_values() -> np.ndarray:
    """The non-negative finite values: 4 bits of exponent (bias 7), 3 of mantissa; the last code is NaN."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def nearest_e4m3(x: np.ndarray) -> np.ndarray:
    """Each number's nearest value, of two the even one; the largest for all beyond it."""
    values = e4m3_values()
    assert values.max() == 448.0
    magnitude = np.minimum(np.abs(x), 448.0)
    upper = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    below, above = values[upper - 1], values[upper]
    ties_up = (upper % 2) == 0  # to the even code
    take_above = (magnitude - below > above - magnitude) | ((magnitude - below == above - magnitude) & ties_up)
    return np.sign(x) * np.where(take_above, above, below)


def numpy_quantize(x: np.ndarray) -> np.ndarray:
    """fp32 [T, K] -> what is left of it after quantization, in float64."""
    scale = np.maximum(np.abs(x).max(axis=1, keepdims=True) / np.float32(448.0), np.float32(1e-12))
    return nearest_e4m3((x / scale).astype(np.float64)) * scale.astype(np.float64)


def rows(num_rows: int, size: int) -> torch.Tensor:
    x = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size))
    x[:1] = 0.0  # a row of zeros
    return x.mul_(torch.logspace(-6, 4, num_rows)[:, None]).to(DEVICE)


@pytest.mark.parametrize(("num_rows", "size"), [(0, 16), (5, 16), (9, 300)])
def test_quantize_rows_equals_numpy(num_rows: int, size: int) -> None:
    x = rows(num_rows, size)
    quantized, scale = fp8.quantize_rows(x)
    assert quantized.dtype == torch.float8_e4m3fn
    if num_rows:
        left = (quantized.double() * scale.double()).cpu().numpy()
        np.testing.assert_allclose(left, numpy_quantize(x.cpu().numpy()), rtol=1e-6)


def test_linear_equals_a_product_of_the_quantized() -> None:
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, weight = torch.randn(7, 64).to(dtype), torch.randn(48, 64).to(dtype)
    bias = torch.randn(48).to(dtype)
    packed = Fp8Weight.quantize(weight.to(DEVICE))
    out = packed.linear(x.to(DEVICE), bias.to(DEVICE)).double().cpu().numpy()
    truth = numpy_quantize(x.float().numpy()) @ numpy_quantize(weight.float().numpy()).T + bias.double().numpy()
    tolerance = 2e-2 if ON_GPU else 1e-4
    np.testing.assert_allclose(out, truth, rtol=tolerance, atol=tolerance * 8)
    plain = x.double().numpy() @ weight.double().numpy().T + bias.double().numpy()
    assert 1e-3 < np.linalg.norm(out - plain) / np.linalg.norm(plain) < 0.06, "quantized, but not spoiled"
    torch.testing.assert_close(packed.dequantize().double().cpu().numpy(), numpy_quantize(weight.float().numpy()))
    assert packed.stored.words.numel() * 2 == 48 * 128, "a byte each, in whole blocks"


def test_a_scale_that_is_given() -> None:
    x = torch.tensor([[1.0, 900.0, -3.0]])
    quantized, scale = fp8.quantize_rows(x, torch.tensor(0.5))
    assert quantized.float().tolist() == [[2.0, 448.0, -6.0]]
    assert scale.tolist() == [[0.5]]


def test_activations_are_cut_off_at_a_bound() -> None:
    """As fbgemm_fp8 has it: a row's scale is that of its largest value or of the bound, whichever is less."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    x, weight = torch.randn(64, 64).to(dtype), torch.randn(48, 64).to(dtype)
    x[::2, 3] = 300.0
    stored = Fp8Weight.of(*fp8.quantize_rows(weight.to(DEVICE)), most=8.0)
    values = x.double()
    scale = values.abs().amax(1, keepdim=True).clamp(max=8.0) / 448.0
    rounded = torch.from_numpy(nearest_e4m3((values / scale).clamp(-448.0, 448.0).numpy())) * scale
    truth = rounded @ stored.dequantize().double().cpu().T
    tolerance = 2e-2 if ON_GPU else 1e-4
    torch.testing.assert_close(stored.linear(x.to(DEVICE), None).double().cpu(), truth, rtol=tolerance, atol=tolerance)
    gated = DeferredActivation(torch.cat((x, x.flip(0)), 1).to(DEVICE), "silu")
    torch.testing.assert_close(stored.linear(gated, None), stored.linear(gated.materialize(), None))
