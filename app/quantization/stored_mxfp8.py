"""OCP's MXFP8: numbers in e4m3, 32 inputs of which share a power of two. Activations stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.kernels.gemm.fp8 import FP8
from app.kernels.gemm.lookup import MX_GROUP
from app.quantization.base import QuantMethod, WeightShares
from app.quantization.forms import Fp8BlockForm, WeightForm

_GROUPS = Dim("input", MX_GROUP)


@dataclass(slots=True, frozen=True)
class StoredMxFp8(QuantMethod):
    """One weight."""

    dtype: torch.dtype  # the type that the model computes in
    unused: tuple[str, ...] = ()

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        return (
            Leaf("weight", FP8, (Dim("output"), Dim("input"))),
            Leaf("weight_scale", torch.uint8, (Dim("output"), _GROUPS), dummy=121),
        )

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        scale, group = shares.spread(torch.exp2(stored["weight_scale"].float() - 127), 1, _GROUPS)
        return Fp8BlockForm(stored["weight"], scale, (1, group), self.dtype, rounds_inputs=False)
