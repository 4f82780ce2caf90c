"""compressed-tensors' `pack-quantized`: codes of 1 to 8 bits in int32 words along the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.quantization.base import QuantMethod, StoredModule, WeightShares
from app.quantization.bits import unpack_bits, words_of
from app.quantization.forms import GroupForm, WeightForm
from app.quantization.input_order import is_ordered, sorted_groups

_INDEX = "weight_g_idx"


@dataclass(slots=True, frozen=True)
class PackedIntegers(QuantMethod):
    """One weight; activations stay as they are."""

    dtype: torch.dtype  # the type that the model computes in
    bits: int
    group: int  # inputs that share a scale; 0: all of an output's, -1: all of the tensor
    has_zeros: bool
    ordered: bool = False  # groups are of inputs that `weight_g_idx` names
    unused: tuple[str, ...] = ("weight_shape",)

    def of_module(self, module: StoredModule) -> PackedIntegers:
        """The method of a module whose index may say that its groups are in order; CheckpointError."""
        if not self.ordered or module.tensors is None or is_ordered(module, _INDEX, self.group, must_say=True):
            return self
        return replace(self, ordered=False, unused=(*self.unused, _INDEX))

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        per, entries = words_of(self.bits)
        leaves = [
            Leaf("weight_packed", torch.int32, (Dim("output"), Dim("input", per, entries))),
            Leaf("weight_scale", torch.float32, self._groups, any_shape=self.group == 0, dummy=0.08 / (1 << self.bits)),
        ]
        if self.has_zeros:
            leaves.append(Leaf("weight_zero_point", torch.int32, (Dim("output", per, entries), *self._groups[1:])))
        if self.ordered:
            leaves.append(Leaf(_INDEX, torch.int32, (Dim("input"),)))
        return tuple(leaves)

    @property
    def _groups(self) -> tuple[Dim, ...]:
        dims = {0: (Dim("output"), Dim("unit")), -1: (Dim("part"),)}
        return dims.get(self.group) or (Dim("output"), Dim("input", self.group, whole=self.ordered))

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        per, entries = words_of(self.bits)
        words = Dim("input", per, entries)
        codes = shares.own(unpack_bits(stored["weight_packed"], self.bits), 1, words)
        scale, group = stored["weight_scale"], max(1, shares.num_inputs)
        offset = None
        if self.group < 0:
            scale = shares.rows_of_parts(scale)
        if self.has_zeros:
            zeros = unpack_bits(stored["weight_zero_point"].t(), self.bits).t()
            offset = -shares.own(zeros, 0, Dim("output", per, entries)).float() * scale
        if self.ordered:
            return sorted_groups(codes, scale, offset, stored[_INDEX], self.bits, self.dtype)
        if self.group > 0:
            scale, group = shares.spread(scale, 1, self._groups[1])
            offset = None if offset is None else shares.spread(offset, 1, self._groups[1])[0]
        return GroupForm(codes, scale, group, self.bits, self.dtype, offset)
