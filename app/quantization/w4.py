"""Weights of 4 bits, rounded to nearest while loading, with a scale for each 128 inputs; activations stay as is."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from app.quantization.base import QuantMethod, WeightShares
from app.quantization.forms import WeightForm
from app.quantization.rounding import to_int4_groups

GROUP = 128


class Int4Method(QuantMethod):
    """Any checkpoint of a floating type, on any device."""

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        return to_int4_groups(stored["weight"], GROUP)

    @classmethod
    def while_loading(cls) -> QuantMethod:
        """The method; one object serves all layers."""
        return cls()
