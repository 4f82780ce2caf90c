"""Products of many rows on a GPU where activations are quantized, too: tensor cores of 8 bits."""

from __future__ import annotations

import torch

from app.kernels.gemm import GatedRows, fp8, fp8_block, int8
from app.kernels.gemm.fp8 import FP8, Fp8Weight
from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.gluon_int8 import wide_int8_product
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.triton_int8 import Int8Tile, int8_product
from app.kernels.gemm.triton_quantize import quantize
from app.kernels.launch import cdiv, nvidia_generation
from app.platforms import platform_of

# Sums stay in the tensor cores instead of being moved to fp32 every few products: faster, a few bits less exact.
_FAST_ACCUMULATION = True
_BLOCK = 128  # whose scales cuBLAS takes
_PROGRAMS = 200  # so many large tiles keep all multiprocessors busy


def _has_products(x: GatedRows, columns: int) -> bool:
    return platform_of(x.device).has_fp8_products and x.dtype == torch.bfloat16 and columns % 16 == 0


def fp8_linear(x: GatedRows, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `fp8.plain_linear`."""
    if not _has_products(x, weight.shape[0]):
        return fp8.plain_linear(x, weight, bias)
    quantized, scale = quantize(x, "e4m3", given=weight.input_scale)
    out: torch.Tensor = torch._scaled_mm(
        quantized, weight.tiles.words.view(FP8).t(), scale_a=scale, scale_b=weight.tiles.scales, out_dtype=x.dtype,
        use_fast_accum=_FAST_ACCUMULATION,
    )  # fmt: skip
    return out if bias is None else out.add_(bias)


def _cublas_takes(weight: Fp8BlockWeight, device: torch.device) -> bool:
    """Blocks of 128 x 128, four or a multiple of it along the inputs: cuBLAS reads rows of so many scales, while torch
    2.11 refuses rows that are padded to it."""
    tiles = weight.tiles
    is_square = tiles.group == tiles.scale_rows == _BLOCK
    return is_square and cdiv(tiles.size, _BLOCK) % 4 == 0 and nvidia_generation(device) >= 9


def fp8_block_linear(x: GatedRows, weight: Fp8BlockWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `fp8_block.plain_linear`."""
    if not _cublas_takes(weight, x.device) or not _has_products(x, weight.shape[0]):
        return fp8_block.plain_linear(x, weight, bias)
    quantized, scale = quantize(x, "e4m3", by_blocks=True)
    out: torch.Tensor = torch._scaled_mm(
        quantized, weight.tiles.words.view(FP8).t(), scale_a=scale, scale_b=weight.scales.t(), out_dtype=x.dtype
    )
    out = out[: len(x)]
    return out if bias is None else out.add_(bias)


def int8_linear(x: GatedRows, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `int8.plain_linear`."""
    if nvidia_generation(x.device) < 9:
        return int8.plain_linear(x, weight, bias)
    quantized, scale = quantize(x, "int8", given=weight.input_scale, zero=weight.input_zero)
    fills = cdiv(len(x), 128) * cdiv(weight.shape[0], 256) >= _PROGRAMS
    if fills and weight.input_zero is None and nvidia_generation(x.device) == 9:
        return wide_int8_product(quantized, scale, weight, bias, x.dtype)
    tile = Int8Tile(128, 256, 128, 8, 4) if fills else Int8Tile(64, 128, 128, 4, 4)
    return int8_product(quantized, scale, weight, bias, x.dtype, tile)
