"""What a quantization method is: the tensors that a linear layer stores for its weight, and the product with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from app.errors import ConfigError, UnsupportedError
from app.kernels.gemm import PackedWeight

Axis = Literal["output", "input", "unit"]  # `unit`: a dimension of one entry, whatever the layer's size


@dataclass(slots=True, frozen=True)
class Dim:
    """One dimension of a stored tensor: each entry stands for `per` outputs or inputs of the layer.

    It is split over tensor-parallel ranks where the layer splits its axis, else every rank holds all of it.
    """

    axis: Axis
    per: int = 1


@dataclass(slots=True, frozen=True)
class Leaf:
    """One stored tensor, under its name in the checkpoint: `weight`, `weight_scale`, `qweight`, ..."""

    name: str
    dtype: torch.dtype
    dims: tuple[Dim, ...]


class QuantMethod(ABC):
    """How linear layers keep their weights. The embedding and the output head keep the model's own type."""

    def check(self, device: torch.device, dtype: torch.dtype) -> None:  # noqa: B027  # most run anywhere
        """Raise ConfigError, saying what to change, where this device or compute type cannot do it."""

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """What a layer of compute type `dtype` loads: here the weight [N, K] as a plain checkpoint has it."""
        return (Leaf("weight", dtype, (Dim("output"), Dim("input"))),)

    @abstractmethod
    def pack(self, stored: Mapping[str, torch.Tensor]) -> PackedWeight | None:
        """The leaves, once they are loaded, as what multiplies: the layer then drops them. None: the layer multiplies
        with its leaf `weight` as it is."""

    @classmethod
    def while_loading(cls) -> QuantMethod:
        """The method for a plain checkpoint (`quantization` in the configuration)."""
        raise ConfigError("quantization: this method reads quantized checkpoints only", param="quantization")

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """The method for a checkpoint with this `quantization_config`; UnsupportedError where it has none."""
        method = scheme.get("quant_method", "unknown")
        raise UnsupportedError(f"quantized checkpoints are not supported (quant_method {method!r})", param="model")
