"""Products of int8 weights, a scale for each output, with activations quantized to int8 (LLM.int8's vector-wise form:
Dettmers et al., 2022; SmoothQuant: Xiao et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from app.kernels.gemm import PackedInputs, materialize
from app.kernels.gemm.fp8 import LEAST_SCALE
from app.kernels.gemm.stored import BLOCK, StoredTiles
from app.kernels.gemm.tiled import TiledWeight, linear
from app.kernels.kernel_table import FROM_HOPPER, Candidate, KernelTable, Needs

LARGEST = 127.0


def quantize_rows(
    x: torch.Tensor, input_scale: torch.Tensor | None = None, input_zero: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (whole numbers less the zero, fp32 [T, K]; scales fp32 [T, 1]). In plain PyTorch.

    Without input_scale the largest value of a row becomes 127; with input_zero numbers are rounded around it.
    """
    x = x.float()
    if input_scale is None:
        scale = (x.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    else:
        scale = input_scale.float().expand(len(x), 1)
    zero = 0.0 if input_zero is None else input_zero.float()
    return torch.round(x / scale + zero).clamp_(-LARGEST - 1, LARGEST) - zero, scale


Product = Callable[[PackedInputs, "Int8Weight", torch.Tensor | None], torch.Tensor]


@dataclass(slots=True, frozen=True)
class Int8Weight(TiledWeight):
    """int8 numbers, each row with a scale."""

    tiles: StoredTiles
    input_scale: torch.Tensor | None = None  # fp32 []; None: each row of activations has its own
    input_zero: torch.Tensor | None = None  # []: what 0 becomes
    sums: torch.Tensor | None = None  # int32 [N], of the rows, where there is a zero
    product: Product = field(init=False)  # the one for the device where it lies

    def __post_init__(self) -> None:
        object.__setattr__(self, "product", INT8_LINEAR.on(self.tiles.words.device))

    @property
    def stored(self) -> StoredTiles:
        """See TiledWeight."""
        return self.tiles

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        scale: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        input_zero: torch.Tensor | None = None,
    ) -> Int8Weight:
        """weight int8 [N, K], scale [N, 1]."""
        tiles = StoredTiles.of_bytes(weight, scale, "int8", BLOCK)
        sums = None if input_zero is None else weight.sum(1, dtype=torch.int32)
        return cls(tiles, input_scale, input_zero, sums)

    def linear(self, x: PackedInputs, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K], quantized -> x W^T + bias, [T, N], in the dtype of x."""
        return self.product(x, self, bias)


def plain_linear(x: PackedInputs, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of what is left of both after quantization."""
    x = materialize(x)
    numbers, scale = quantize_rows(x, weight.input_scale, weight.input_zero)
    return linear((numbers * scale).to(x.dtype), weight.tiles, bias)


INT8_LINEAR: KernelTable[Product] = KernelTable(
    "int8 products",
    Candidate("app.kernels.gemm.triton_quantized:int8_linear", Needs("triton", generations=FROM_HOPPER.generations)),
    Candidate("app.kernels.gemm.int8:plain_linear"),
)
