"""fp8 (e4m3) weights with a scale for each block of 128 outputs and 128 inputs, and activations with one for each token
and 128 inputs (DeepSeek-V3, arXiv 2412.19437), quantized while loading."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from app.quantization.base import QuantMethod, WeightShares
from app.quantization.forms import WeightForm
from app.quantization.fp8_conditions import check_fp8
from app.quantization.rounding import to_fp8_blocks

BLOCK = (128, 128)


class Fp8BlockMethod(QuantMethod):
    """Any checkpoint of a floating type; bf16 on GPUs, on CPUs any type (slow: for tests)."""

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """GPUs need e4m3 tensor cores, whose products come out as bf16."""
        check_fp8("quantization=fp8_block", "leave it out", device, dtype)

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        return to_fp8_blocks(stored["weight"], BLOCK)

    @classmethod
    def while_loading(cls) -> QuantMethod:
        """The method; one object serves all layers."""
        return cls()
