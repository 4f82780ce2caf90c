"""fp8 (e4m3: Micikevicius et al., 2022) weights and activations, quantized while loading: a scale for each output
channel of a weight, and for each token of an activation when it arrives. Halves the bytes of the weights and doubles
the tensor cores' rate."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from app.engine.quantization.base import QuantMethod
from app.errors import ConfigError
from app.kernels.gemm import PackedWeight
from app.kernels.gemm.fp8 import Fp8Weight
from app.platforms import platform_of


class Fp8Method(QuantMethod):
    """Any checkpoint of a floating type; bf16 on GPUs, on CPUs any type (slow: for tests)."""

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """GPUs need e4m3 tensor cores, whose products come out as bf16."""
        check_fp8("quantization=fp8", "leave it out", device, dtype)

    def pack(self, stored: Mapping[str, torch.Tensor]) -> PackedWeight | None:
        """The products of fp8 tensor cores take sizes that are multiples of 16; other weights stay as they are."""
        weight = stored["weight"]
        return None if weight.shape[0] % 16 or weight.shape[1] % 16 else Fp8Weight.of(weight)

    @classmethod
    def while_loading(cls) -> QuantMethod:
        """The method; one object serves all layers."""
        return cls()


def check_fp8(what: str, remedy: str, device: torch.device, dtype: torch.dtype) -> None:
    """ConfigError where `what` cannot be computed; `remedy` says what to do."""
    platform = platform_of(device)
    if (refusal := platform.fp8_refusal(device)) is not None:
        raise ConfigError(f"{what}: {refusal}; {remedy}", param="quantization")
    if platform.has_fp8_products and dtype != torch.bfloat16:
        given = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{what} needs dtype=bfloat16 on a GPU, not {given}", param="quantization")
