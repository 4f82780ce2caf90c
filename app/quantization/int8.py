"""int8 weights and activations, quantized while loading: a scale for each output channel of a weight, and for each
token of an activation when it arrives (LLM.int8's vector-wise form: Dettmers et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from app.quantization.base import QuantMethod, WeightShares
from app.quantization.forms import WeightForm
from app.quantization.rounding import to_int8_rows


class Int8Method(QuantMethod):
    """Any checkpoint of a floating type, on any device."""

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        return to_int8_rows(stored["weight"])

    @classmethod
    def while_loading(cls) -> QuantMethod:
        """The method; one object serves all layers."""
        return cls()
