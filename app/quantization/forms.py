"""Defines what a stored weight is once it is unpacked, whatever format it came from: the numbers of this rank's share
in and columns, with their scales. Each form makes the weight of one kernel (app/kernels/gemm).

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
from app.kernels.gemm.fp8_block import Fp8BlockWeight, Fp8OnlyWeight
from app.kernels.gemm.group import GroupWeight, of_inputs
from app.kernels.gemm.int8 import Int8Weight
from app.kernels.gemm.lookup import TableWeight


class WeightForm(ABC):
    """A weight [N, K]."""

    rows: ClassVar[tuple[str, ...]] = ()  # fields of a row for each output
    largest: ClassVar[tuple[str, ...]] = ()  # fields of which forms side by side take the largest
    can_join: ClassVar[bool] = True

    @abstractmethod
    def pack(self) -> PackedWeight | None:
        """Returns what multiplies by it; None: the plain tensor does, as it is."""

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
        """True if the other is stored alike, up to the numbers in its rows."""
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
    """Holds what a method with a kernel of its own has packed already."""

    can_join: ClassVar[bool] = False
    packed: PackedWeight

    def pack(self) -> PackedWeight | None:
        """The packed weight as it is."""
        return self.packed


@dataclass(slots=True, frozen=True)
class Fp8RowForm(WeightForm):
    """e4m3 numbers, a scale for each row."""

    rows: ClassVar[tuple[str, ...]] = ("weight", "scale")
    largest: ClassVar[tuple[str, ...]] = ("input_scale",)
    weight: torch.Tensor  # e4m3 [N, K]
    scale: torch.Tensor  # fp32 [N, 1]
    dtype: torch.dtype = torch.bfloat16  # the type that the model computes in
    input_scale: torch.Tensor | None = None  # fp32 []; None: each row of activations has its own
    most: float | None = None  # beyond which activations are cut off

    def pack(self) -> PackedWeight | None:
        """See WeightForm."""
        return Fp8Weight.of(self.weight, self.scale, self.input_scale, self.most)

    def dequantize(self) -> torch.Tensor:
        """See WeightForm."""
        return self.weight.float() * self.scale


@dataclass(slots=True, frozen=True)
class Fp8BlockForm(WeightForm):
    """e4m3 numbers, a scale for each block of outputs and inputs; activations have one for each row and as many
    inputs, if they are rounded."""

    rows: ClassVar[tuple[str, ...]] = ("weight", "scale")
    weight: torch.Tensor  # e4m3 [N, K]
    scale: torch.Tensor  # fp32 [N / block[0], K / block[1]], rounded up
    block: tuple[int, int]
    dtype: torch.dtype
    rounds_inputs: bool = True

    def beside(self, other: WeightForm) -> Fp8BlockForm | None:
        """See WeightForm.beside: only whole blocks have anything below them."""
        return None if self.weight.shape[-2] % self.block[0] else WeightForm.beside(self, other)

    def pack(self) -> PackedWeight | None:
        """See WeightForm."""
        kind = Fp8BlockWeight if self.rounds_inputs else Fp8OnlyWeight
        return kind.of(self.weight, self.scale, self.block)

    def dequantize(self) -> torch.Tensor:
        """See WeightForm."""
        scale = self.scale.repeat_interleave(self.block[0], 0)[: self.weight.shape[0]]
        return self.weight.float() * of_groups(scale, self.block[1], self.weight.shape[1])


@dataclass(slots=True, frozen=True)
class Int8RowForm(WeightForm):
    """int8 numbers, a scale for each row, and activations in int8."""

    rows: ClassVar[tuple[str, ...]] = ("weight", "scale")
    weight: torch.Tensor  # int8 [N, K]
    scale: torch.Tensor  # fp32 [N, 1]
    dtype: torch.dtype
    input_scale: torch.Tensor | None = None  # fp32 []; None: each row of activations has its own
    input_zero: torch.Tensor | None = None  # []: what 0 becomes

    def pack(self) -> PackedWeight | None:
        """See WeightForm."""
        return Int8Weight.of(self.weight, self.scale, self.input_scale, self.input_zero)

    def dequantize(self) -> torch.Tensor:
        """See WeightForm."""
        return self.weight.float() * self.scale


@dataclass(slots=True, frozen=True)
class GroupForm(WeightForm):
    """Whole numbers: code * scale + offset; without offsets, (code - half their range) * scale."""

    rows: ClassVar[tuple[str, ...]] = ("codes", "scale", "offset")
    codes: torch.Tensor  # uint8 [N, K]
    scale: torch.Tensor  # fp32 [N, K / group], rounded up
    group: int
    bits: int
    dtype: torch.dtype
    offset: torch.Tensor | None = None  # as the scale
    # int64 [K]: column k of the codes multiplies input order[k]. Columns that only fill a group up stand for 0, and
    # name an input a second time.
    order: torch.Tensor | None = None

    def pack(self) -> PackedWeight | None:
        """See WeightForm."""
        return GroupWeight.of(self.codes, self.scale, self.offset, self.bits, self.order, self.dtype, group=self.group)

    def dequantize(self) -> torch.Tensor:
        """See WeightForm."""
        size = self.codes.shape[1]
        codes = self.codes.float() - (0 if self.offset is not None else 1 << (self.bits - 1))
        weight = codes * of_groups(self.scale, self.group, size)
        weight = weight if self.offset is None else weight + of_groups(self.offset, self.group, size)
        return of_inputs(weight, self.order)


@dataclass(slots=True, frozen=True)
class TableForm(WeightForm):
    """Numbers of a table: table[code] * scale."""

    rows: ClassVar[tuple[str, ...]] = ("codes", "scale")
    codes: torch.Tensor  # uint8 [N, K]
    table: torch.Tensor  # fp32 [16]
    scale: torch.Tensor  # fp32 [N, K / group], rounded up
    group: int
    dtype: torch.dtype

    def pack(self) -> PackedWeight | None:
        """See WeightForm."""
        return TableWeight.of(self.codes, self.table, self.scale, self.dtype, group=self.group)

    def dequantize(self) -> torch.Tensor:
        """See WeightForm."""
        values = self.table[self.codes.int()] if self.table.ndim == 1 else self.table.gather(1, self.codes.long())
        return values * of_groups(self.scale, self.group, self.codes.shape[1])


@dataclass(slots=True, frozen=True)
class RowTableForm(TableForm):
    """The same with a table for each row, [N, 16]."""

    rows: ClassVar[tuple[str, ...]] = ("codes", "table", "scale")


def of_groups(numbers: torch.Tensor, size: int, num_columns: int) -> torch.Tensor:
    """Numbers of groups of `size` columns, [N, groups], as one for each column, fp32 [N, num_columns]."""
    return numbers.float().repeat_interleave(size, dim=1)[:, :num_columns]
