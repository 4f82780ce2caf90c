"""Products of many rows on a GPU where activations are quantized, too: tensor cores of 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.kernels.gemm import GatedRows, NumberKind, PackedInputs, PackedWeight, QuantizedNorm, fp8, fp8_block
from app.kernels.gemm.fp8 import FP8, Fp8Weight
from app.kernels.gemm.fp8_block import Fp8BlockWeight
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.triton_int8 import Int8Tile
from app.kernels.gemm.triton_quantize import quantize
from app.kernels.kernel_table import HOPPER, Candidate, Kernel, KernelTable, chosen
from app.kernels.launch import cdiv

# Sums stay in the tensor cores instead of being moved to fp32 every few products: faster, a few bits less exact.
_FAST_ACCUMULATION = True
_BLOCK = 128  # whose scales cuBLAS takes

# (x int8 [T, K in whole blocks], its scales [T, 1], weight, bias, type of the result, tile) -> [T, N]
Int8Product = Callable[
    [torch.Tensor, torch.Tensor, Int8Weight, torch.Tensor | None, torch.dtype, Int8Tile],
    torch.Tensor,
]
INT8_PRODUCTS: KernelTable[Kernel[[int, Int8Weight], Int8Tile, Int8Product]] = KernelTable(
    "int8 products of so many rows",
    Candidate("app.kernels.gemm.gluon_int8:KERNEL", HOPPER),
    Candidate("app.kernels.gemm.triton_int8:KERNEL"),
)


INT8, FP8_ROWS, FP8_BLOCKS = NumberKind("int8"), NumberKind("e4m3"), NumberKind("e4m3", by_blocks=True)


def _settled(x: PackedInputs) -> GatedRows:
    """x, for a reader with a scale of its own."""
    return x.materialize() if isinstance(x, QuantizedNorm) else x


def _has_products(x: PackedInputs, columns: int) -> bool:
    return x.dtype == torch.bfloat16 and columns % 16 == 0


def numbers_of(weight: PackedWeight) -> NumberKind | None:
    """The numbers that products of many rows with such a weight take, if they follow from the rows alone."""
    if isinstance(weight, Int8Weight) and weight.input_scale is None and weight.input_zero is None:
        return INT8
    if isinstance(weight, Fp8Weight) and weight.input_scale is None:
        return FP8_ROWS
    return FP8_BLOCKS if isinstance(weight, Fp8BlockWeight) and _cublas_takes(weight) else None


def _numbers(x: PackedInputs, kind: NumberKind) -> tuple[torch.Tensor, torch.Tensor]:
    """x as such numbers, and their scales."""
    if isinstance(x, QuantizedNorm):
        if x.kind == kind:
            return x.numbers, x.scales
        x = x.materialize()
    return quantize(x, kind.name, by_blocks=kind.by_blocks)


def fp8_linear(x: PackedInputs, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `fp8.plain_linear`."""
    if not _has_products(x, weight.shape[0]):
        return fp8.plain_linear(x, weight, bias)
    if weight.input_scale is None:
        quantized, scale = _numbers(x, FP8_ROWS)
    else:
        quantized, scale = quantize(_settled(x), "e4m3", given=weight.input_scale)
    out: torch.Tensor = torch._scaled_mm(
        quantized, weight.tiles.words.view(FP8).t(), scale_a=scale, scale_b=weight.tiles.scales, out_dtype=x.dtype,
        use_fast_accum=_FAST_ACCUMULATION,
    )  # fmt: skip
    return out if bias is None else out.add_(bias)


def _cublas_takes(weight: Fp8BlockWeight) -> bool:
    """Blocks of 128 x 128, four or a multiple of it along the inputs: cuBLAS reads rows of so many scales, while torch
    2.11 refuses rows that are padded to it."""
    tiles = weight.tiles
    is_square = tiles.group == tiles.scale_rows == _BLOCK
    return is_square and cdiv(tiles.size, _BLOCK) % 4 == 0


def fp8_block_linear(x: PackedInputs, weight: Fp8BlockWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `fp8_block.plain_linear`."""
    if not _cublas_takes(weight) or not _has_products(x, weight.shape[0]):
        return fp8_block.plain_linear(x, weight, bias)
    quantized, scale = _numbers(x, FP8_BLOCKS)
    out: torch.Tensor = torch._scaled_mm(
        quantized, weight.tiles.words.view(FP8).t(), scale_a=scale, scale_b=weight.scales.t(), out_dtype=x.dtype
    )
    out = out[: len(x)]
    return out if bias is None else out.add_(bias)


def int8_linear(x: PackedInputs, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `int8.plain_linear`."""
    if weight.input_scale is None and weight.input_zero is None:
        quantized, scale = _numbers(x, INT8)
    else:
        quantized, scale = quantize(_settled(x), "int8", given=weight.input_scale, zero=weight.input_zero)
    product, tile = chosen(INT8_PRODUCTS.all_on(x.device), len(x), weight)
    return product(quantized, scale, weight, bias, x.dtype, tile)
