"""Quantization methods by name: one file and one line each. A method turns a linear layer's loaded weight into a
`PackedWeight` that multiplies; the layers and the loader know nothing else of it."""

from __future__ import annotations

from typing import Protocol

import torch

from app.kernels.gemm import PackedWeight
from app.registry import Registry


class QuantMethod(Protocol):
    """How linear layers are quantized. The embedding and the output head keep the model's own type."""

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError, saying what to change, where this device or type cannot do it."""
        ...

    def pack(self, weight: torch.Tensor) -> PackedWeight | None:
        """A quantized copy of weight [N, K]; None for a shape that the method leaves as it is."""
        ...


QUANT_METHODS: Registry[QuantMethod] = Registry("quantization", {"fp8": "app.engine.quantization.fp8:METHOD"})


def select_quantization(
    name: str | None, device: torch.device, dtype: torch.dtype
) -> tuple[QuantMethod | None, list[str]]:
    """The method `name` and a line that says so, or neither for None. ConfigError where it cannot run."""
    if name is None:
        return None, []
    method = QUANT_METHODS.load(name)
    method.check(device, dtype)
    return method, [f"quantization: {name} (linear layers)"]
