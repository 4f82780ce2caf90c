"""fp8 (e4m3: Micikevicius et al., 2022) weights and activations, quantized while loading: a scale for each output
channel of a weight, and for each token of an activation when it arrives. Halves the bytes of the weights and doubles
the tensor cores' rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from app.quantization.base import QuantMethod, WeightShares
from app.quantization.forms import PlainForm, WeightForm
from app.quantization.fp8_checkpoint import Fp8Checkpoint
from app.quantization.fp8_conditions import check_fp8
from app.quantization.rounding import to_fp8_rows


class Fp8Method(QuantMethod):
    """Any checkpoint of a floating type; bf16 on GPUs, on CPUs any type (slow: for tests)."""

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """GPUs need e4m3 tensor cores, whose products come out as bf16."""
        check_fp8("quantization=fp8", "leave it out", device, dtype)

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """The products of fp8 tensor cores take sizes that are multiples of 16; other weights stay as they are."""
        weight = stored["weight"]
        return PlainForm(weight) if weight.shape[0] % 16 or weight.shape[1] % 16 else to_fp8_rows(weight)

    @classmethod
    def while_loading(cls) -> QuantMethod:
        """The method; one object serves all layers."""
        return cls()

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """A checkpoint of that name brings weights in fp8."""
        return Fp8Checkpoint.of_checkpoint(scheme)
