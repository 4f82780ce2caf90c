"""No quantization: weights of the compute type, in the order of a faster kernel where there is one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from app.kernels.gemm import PackedWeight, pack_weight
from app.quantization.base import QuantMethod


class PlainMethod(QuantMethod):
    """Weights as they are: any device and type."""

    def pack(self, stored: Mapping[str, torch.Tensor]) -> PackedWeight | None:
        """Pack the weight where that is faster."""
        return pack_weight(stored["weight"])


PLAIN_METHOD = PlainMethod()
