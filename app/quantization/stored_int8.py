"""Weights that a checkpoint holds as int8, a number a byte, with a scale for a tensor, for each output or each group of
inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.quantization.base import QuantMethod, WeightShares
from app.quantization.forms import GroupForm, Int8RowForm, WeightForm


@dataclass(slots=True, frozen=True)
class StoredInt8(QuantMethod):
    """One weight, symmetric."""

    dtype: torch.dtype  # the type that the model computes in
    group: int  # inputs that share a scale; 0: all of an output's, -1: all of the tensor
    rounds_inputs: bool  # activations are quantized too, each row as it arrives
    static_inputs: bool = False  # or with a scale that is stored,
    input_zeros: bool = False  # around a zero
    unused: tuple[str, ...] = ()

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        dims = {0: (Dim("output"), Dim("unit")), -1: (Dim("part"),)}
        scale = dims.get(self.group) or (Dim("output"), Dim("input", self.group))
        leaves = [
            Leaf("weight", torch.int8, (Dim("output"), Dim("input"))),
            Leaf("weight_scale", torch.float32, scale, any_shape=self.group == 0, dummy=3e-4),
        ]
        if self.static_inputs:
            leaves.append(Leaf("input_scale", torch.float32, (Dim("part"),), dummy=0.05))
        if self.input_zeros:
            leaves.append(Leaf("input_zero_point", torch.int8, (Dim("part"),), dummy=0.0))
        return tuple(leaves)

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        weight, scale, group = stored["weight"], stored["weight_scale"], shares.num_inputs
        if self.group > 0:
            scale, group = shares.spread(scale, 1, Dim("input", self.group))
        elif self.group < 0:
            scale = shares.rows_of_parts(scale)
        if not self.rounds_inputs:
            codes = weight.view(torch.uint8) ^ 0x80
            return GroupForm(codes, scale, max(group, 1), 8, self.dtype)
        if not self.static_inputs:
            return Int8RowForm(weight, scale, self.dtype)
        return Int8RowForm(weight, scale, self.dtype, *self._inputs(stored))

    def _inputs(self, stored: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A scale and a zero in which all parts' ranges lie: those of one input, if they were measured apart."""
        scales = stored["input_scale"]
        if not self.input_zeros:
            return scales.max(), None
        zeros = stored["input_zero_point"].float()
        low, high = ((-128 - zeros) * scales).min(), ((127 - zeros) * scales).max()
        if bool((scales == scales[0]).all() and (zeros == zeros[0]).all()):
            return scales[0], zeros[0]
        scale = (high - low) / 255
        return scale, (-128 - low / scale).round()
