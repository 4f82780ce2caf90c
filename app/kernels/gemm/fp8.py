"""Products of fp8 (e4m3) weights, a scale for each output channel, with activations quantized for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from app.kernels.float8 import widened
from app.kernels.gemm import PackedInputs, materialize
from app.kernels.gemm.stored import BLOCK, StoredTiles
from app.kernels.gemm.tiled import TiledWeight, linear
from app.kernels.kernel_table import Candidate, KernelTable, Needs

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest finite e4m3
LEAST_SCALE = 1e-12  # that of a row of zeros


def quantize_rows(x: torch.Tensor, input_scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (e4m3 [T, K], scales fp32 [T, 1]), in plain PyTorch. The largest value of a row becomes 448, unless
    its scale is given."""
    x = x.float()
    if input_scale is None:
        scale = (x.abs().amax(dim=1, keepdim=True) / x.new_full((), LARGEST)).clamp_(min=LEAST_SCALE)
    else:
        scale = input_scale.float().expand(len(x), 1)
    return (x / scale).clamp_(-LARGEST, LARGEST).to(FP8), scale


def rounded_rows(x: torch.Tensor, input_scale: torch.Tensor | None = None, most: float | None = None) -> torch.Tensor:
    """Take from x [T, K] what quantizing its rows takes, and what is beyond `most`."""
    quantized, scale = quantize_rows(x if most is None else x.clamp(-most, most), input_scale)
    return (widened(quantized, torch.float32) * scale).to(x.dtype)


Product = Callable[[PackedInputs, "Fp8Weight", torch.Tensor | None], torch.Tensor]


@dataclass(slots=True, frozen=True)
class Fp8Weight(TiledWeight):
    """e4m3 numbers, each row with a scale."""

    tiles: StoredTiles
    input_scale: torch.Tensor | None = None  # fp32 []; None: each row of activations has its own
    most: float | None = None  # beyond which activations are cut off before they are rounded
    product: Product = field(init=False)  # the one for the device where it lies

    def __post_init__(self) -> None:
        object.__setattr__(self, "product", FP8_LINEAR.on(self.tiles.words.device))

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
        most: float | None = None,
    ) -> Fp8Weight:
        """weight e4m3 [N, K], scale [N, 1]."""
        return cls(StoredTiles.of_bytes(weight, scale, "e4m3", BLOCK), input_scale, most)

    @classmethod
    def quantize(cls, weight: torch.Tensor) -> Fp8Weight:
        """Round weight [N, K]; the largest of a row becomes 448."""
        return cls.of(*quantize_rows(weight))

    def linear(self, x: PackedInputs, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K], quantized -> x W^T + bias, [T, N], in the dtype of x."""
        x = x if self.most is None else materialize(x).clamp(-self.most, self.most)
        return self.product(x, self, bias)


def plain_linear(x: PackedInputs, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of what is left of both after quantization."""
    return linear(rounded_rows(materialize(x), weight.input_scale), weight.tiles, bias)


FP8_LINEAR: KernelTable[Product] = KernelTable(
    "fp8 products",
    Candidate("app.kernels.gemm.triton_quantized:fp8_linear", Needs("triton", fp8_products=True)),
    Candidate("app.kernels.gemm.fp8:plain_linear"),
)
