"""What a stored weight is once it is unpacked, whatever format it came from: the numbers of this rank's share in rows
and columns, with their scales. Each form makes the weight of one kernel (app/kernels/gemm).

Forms of a kind lie side by side where a fused layer's parts were loaded apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, cast

import torch

from app.errors import UnsupportedError
from app.kernels.gemm import PackedWeight, pack_weight
from app.kernels.gemm.fp8 import Fp8Weight


class WeightForm(ABC):
    """A weight [N, K]."""

    rows: ClassVar[tuple[str, ...]] = ()  # fields of a row for each output
    largest: ClassVar[tuple[str, ...]] = ()  # fields of which forms side by side take the largest
    can_join: ClassVar[bool] = True

    @abstractmethod
    def pack(self) -> PackedWeight | None:
        """What multiplies by it; None: the plain tensor does, as it is."""

    def dequantize(self) -> torch.Tensor:
        """The weight in fp32, [N, K]; UnsupportedError where only its kernel knows it."""
        dequantize = getattr(self.pack(), "dequantize", None)
        if dequantize is None:
            raise UnsupportedError("a quantized embedding whose method does not dequantize", param="model")
        return cast("torch.Tensor", dequantize())

    def beside(self, other: WeightForm) -> Self | None:
        """This one's rows, then the other's, as one weight; None where they are unlike."""
        if type(other) is not type(self) or not self.can_join or not self._agrees(other):
            return None
        fields_of_both = {name: (getattr(self, name), getattr(other, name)) for name in (*self.rows, *self.largest)}
        merged = {name: _merged(*both, largest=name in self.largest) for name, both in fields_of_both.items()}
        return cast("Self", replace(cast("Any", self), **merged))

    def _agrees(self, other: WeightForm) -> bool:
        """Whether the other is stored alike, up to the numbers in its rows."""
        for field in fields(cast("Any", self)):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if (mine is None) != (theirs is None):
                return False
            if mine is None:
                continue
            if field.name in self.rows:
                if mine.shape[-1] != theirs.shape[-1] or mine.dtype != theirs.dtype:
                    return False
            elif isinstance(mine, torch.Tensor):
                if field.name not in self.largest and not torch.equal(mine, theirs):
                    return False
            elif mine != theirs:
                return False
        return True


def _merged(a: torch.Tensor | None, b: torch.Tensor, largest: bool) -> torch.Tensor | None:
    if a is None:
        return None
    return torch.maximum(a, b) if largest else torch.cat((a, b), dim=-2)


@dataclass(slots=True, frozen=True)
class PlainForm(WeightForm):
    """Numbers of the compute type."""

    rows: ClassVar[tuple[str, ...]] = ("weight",)
    weight: torch.Tensor  # [N, K]

    def pack(self) -> PackedWeight | None:
        """Packed where that is faster."""
        return pack_weight(self.weight)

    def dequantize(self) -> torch.Tensor:
        """See WeightForm."""
        return self.weight.float()


@dataclass(slots=True, frozen=True)
class PackedForm(WeightForm):
    """What a method with a kernel of its own has packed already."""

    can_join: ClassVar[bool] = False
    packed: PackedWeight

    def pack(self) -> PackedWeight | None:
        """The packed weight as it is."""
        return self.packed


@dataclass(slots=True, frozen=True)
class Fp8RowForm(WeightForm):
    """e4m3, a scale for each row."""

    rows: ClassVar[tuple[str, ...]] = ("weight", "scale")
    weight: torch.Tensor  # e4m3 [N, K]
    scale: torch.Tensor  # fp32 [N, 1]

    def pack(self) -> PackedWeight | None:
        """See WeightForm."""
        return Fp8Weight(self.weight, self.scale)
