"""Products of fp8 (e4m3) weights with a scale for each block of outputs and inputs, and activations with one for each
row and as many inputs (DeepSeek-V3, arXiv 2412.19437)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from app.kernels.float8 import widened
from app.kernels.gemm import PackedInputs, materialize
from app.kernels.gemm.fp8 import FP8, LARGEST, LEAST_SCALE
from app.kernels.gemm.stored import StoredTiles, block_for, groups_first, pack_words
from app.kernels.gemm.tiled import TiledWeight, linear
from app.kernels.kernel_table import FROM_HOPPER, Candidate, KernelTable, Needs


def quantize_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (e4m3 [T, K], scales fp32 [T, ceil(K / group)]): a group's largest becomes 448. Plain PyTorch."""
    size = x.shape[1]
    groups = F.pad(x.float(), (0, -size % group)).view(len(x), -(-size // group), group)
    scale = (groups.abs().amax(dim=2) / LARGEST).clamp_(min=LEAST_SCALE)
    quantized = (groups / scale[..., None]).clamp_(-LARGEST, LARGEST).to(FP8)
    return quantized.flatten(1)[:, :size], scale


def rounded_groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """Take from x [T, K] what quantizing groups of its inputs takes."""
    quantized, scale = quantize_groups(x, group)
    spread = scale.repeat_interleave(group, dim=1)[:, : x.shape[1]]
    return (widened(quantized, torch.float32) * spread).to(x.dtype)


def _tiles(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> StoredTiles:
    depth = block_for("e4m3", block[1])
    words = pack_words(weight.view(torch.uint8), "e4m3", depth)
    sizes = weight.shape[1], depth, block[1]
    return StoredTiles("e4m3", words, groups_first(scale.float(), *sizes), None, None, *sizes, block[0])


@dataclass(slots=True, frozen=True)
class Fp8OnlyWeight(TiledWeight):
    """e4m3 numbers, each block with a scale; activations stay as they are."""

    tiles: StoredTiles

    @property
    def stored(self) -> StoredTiles:
        """See TiledWeight."""
        return self.tiles

    @classmethod
    def of(cls, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> Fp8OnlyWeight:
        """weight e4m3 [N, K], scale [ceil(N / block[0]), ceil(K / block[1])], by which it is multiplied."""
        return cls(_tiles(weight, scale, block))


Product = Callable[[PackedInputs, "Fp8BlockWeight", torch.Tensor | None], torch.Tensor]


@dataclass(slots=True, frozen=True)
class Fp8BlockWeight(TiledWeight):
    """e4m3 numbers, each block with a scale."""

    tiles: StoredTiles
    scales: torch.Tensor  # fp32 [N / block, K / block, to a multiple of 4], as products of cuBLAS read them
    product: Product = field(init=False)  # the one for the device where it lies

    def __post_init__(self) -> None:
        object.__setattr__(self, "product", FP8_BLOCK_LINEAR.on(self.tiles.words.device))

    @property
    def stored(self) -> StoredTiles:
        """See TiledWeight."""
        return self.tiles

    @classmethod
    def of(cls, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> Fp8BlockWeight:
        """weight e4m3 [N, K], scale [ceil(N / block[0]), ceil(K / block[1])], by which it is multiplied."""
        padded = F.pad(scale.float(), (0, -scale.shape[1] % 4)).contiguous()
        return cls(_tiles(weight, scale, block), padded)

    def linear(self, x: PackedInputs, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K], quantized -> x W^T + bias, [T, N], in the dtype of x."""
        return self.product(x, self, bias)


def plain_linear(x: PackedInputs, weight: Fp8BlockWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of what is left of both after quantization."""
    return linear(rounded_groups(materialize(x), weight.tiles.group), weight.tiles, bias)


FP8_BLOCK_LINEAR: KernelTable[Product] = KernelTable(
    "fp8 block products",
    Candidate(
        "app.kernels.gemm.triton_quantized:fp8_block_linear",
        Needs("triton", generations=FROM_HOPPER.generations, fp8_products=True),
    ),
    Candidate("app.kernels.gemm.fp8_block:plain_linear"),
)
