"""Products of fp8 (e4m3) weights, a scale for each output channel, with activations quantized for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from app.kernels.gemm import PackedWeight
from app.platforms import platform_of
from app.registry import Registry

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest finite e4m3
LEAST_SCALE = 1e-12  # that of a row of zeros
# Sums stay in the tensor cores instead of being moved to fp32 every few products: faster, a few bits less exact.
_FAST_ACCUMULATION = True

# x [T, K] of a floating type -> (e4m3 [T, K], scales fp32 [T, 1]) with x = e4m3 * scale
QUANTIZE_ROWS: Registry[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = Registry(
    "quantize_rows",
    {
        "torch": "app.kernels.gemm.fp8:quantize_rows",
        "triton": "app.kernels.gemm.triton_fp8:quantize_rows",
    },
)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (e4m3 [T, K], scales fp32 [T, 1]): the largest value of a row becomes 448. In plain PyTorch."""
    x = x.float()
    scale = (x.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    return (x / scale).clamp_(-LARGEST, LARGEST).to(FP8), scale


@dataclass(slots=True, frozen=True)
class Fp8Weight(PackedWeight):
    """e4m3 numbers, each row with a scale."""

    weight: torch.Tensor  # e4m3 [N, K]
    scale: torch.Tensor  # fp32 [N, 1]

    @classmethod
    def of(cls, weight: torch.Tensor) -> Fp8Weight:
        """Quantize weight [N, K]."""
        return cls(*quantize_rows(weight))

    def dequantize(self) -> torch.Tensor:
        """The numbers in fp32, [N, K]."""
        return self.weight.float() * self.scale

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias, [T, N], in the dtype of x."""
        platform = platform_of(x.device)
        quantized, scale = QUANTIZE_ROWS.load(platform.kernels)(x)
        if platform.has_fp8_products:
            out: torch.Tensor = torch._scaled_mm(
                quantized, self.weight.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=x.dtype,
                use_fast_accum=_FAST_ACCUMULATION,
            )  # fmt: skip
        else:
            out = (F.linear(quantized.float(), self.weight.float()) * scale * self.scale.t()).to(x.dtype)
        return out if bias is None else out.add_(bias)
