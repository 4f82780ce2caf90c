"""Weights of 4 bits that are floats (e2m1), two in a byte, with a scale for each few inputs: NVIDIA's NVFP4 (a scale in
e4m3 for 16, and one for the tensor) and OCP's MXFP4 (a power of two for 32). Activations stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.kernels.gemm.fp8 import FP8
from app.kernels.gemm.stored import E2M1
from app.quantization.base import QuantMethod, WeightShares
from app.quantization.bits import unpack_bits
from app.quantization.forms import TableForm, WeightForm

_BYTES = Dim("input", 2)


@dataclass(slots=True, frozen=True)
class StoredFp4(QuantMethod):
    """One weight."""

    dtype: torch.dtype  # the type that the model computes in
    group: int
    # The name of the tensor's own scale; None: MXFP4, which has none.
    tensor_scale: str | None = None
    divides: bool = False  # by the tensor's scale, in place of multiplying
    codes: str = "weight_packed"
    unused: tuple[str, ...] = ()

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        codes = Leaf(self.codes, torch.uint8, (Dim("output"), _BYTES))
        scales = (Dim("output"), Dim("input", self.group))
        if self.tensor_scale is None:
            return (codes, Leaf("weight_scale", torch.uint8, scales, dummy=120))
        whole = 1e4 if self.divides else 1e-4
        return (
            codes,
            Leaf("weight_scale", FP8, scales, dummy=96.0),
            Leaf(self.tensor_scale, torch.float32, (Dim("part"),), dummy=whole),
        )

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        codes = shares.own(unpack_bits(stored[self.codes].view(torch.int8), 4), 1, _BYTES)
        scale = stored["weight_scale"]
        if self.tensor_scale is None:
            scale = torch.exp2(scale.float() - 127)
        else:
            whole = shares.rows_of_parts(stored[self.tensor_scale])
            scale = scale.float() / whole if self.divides else scale.float() * whole
        scale, group = shares.spread(scale, 1, Dim("input", self.group))
        return TableForm(codes, E2M1.to(codes.device), scale, group, self.dtype)
