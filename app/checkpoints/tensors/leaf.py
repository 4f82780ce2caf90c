"""One stored tensor of a layer, and the outputs and inputs of the layer that its dimensions stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# `unit`: a dimension of `entries`, whatever the layer's size; `part`: an entry for each part of a fused layer, of which
# the checkpoint stores one at a time.
Axis = Literal["output", "input", "unit", "part"]


@dataclass(slots=True, frozen=True)
class Share:
    """This rank's part of one axis of a checkpoint's tensor, and its place in the parameter."""

    offset: int  # in the parameter
    size: int
    start: int  # in the checkpoint's tensor
    whole: int  # entries of the checkpoint's tensor


@dataclass(slots=True, frozen=True)
class Dim:
    """One dimension of a stored tensor: `entries` of it stand for `per` outputs or inputs of the layer.

    It is split over tensor-parallel ranks where the layer splits its axis, unless it is `whole`. A rank whose share
    begins or ends within `per` reads the entries around it.
    """

    axis: Axis
    per: int = 1
    entries: int = 1
    whole: bool = False  # every rank holds all of it

    def count(self, size: int) -> int:
        """Entries that stand for `size` outputs or inputs."""
        return -(-size * self.entries // self.per)

    def cover(self, share: Share) -> Share:
        """The entries in which a share of the axis lies."""
        whole = self.count(share.whole)
        if self.whole or share.size == share.whole:
            return Share(self.count(share.offset), whole, 0, whole)
        first = share.start // self.per * self.entries
        end = min(whole, -(-(share.start + share.size) // self.per) * self.entries)
        return Share(self.count(share.offset), end - first if share.size else 0, first, whole)


@dataclass(slots=True, frozen=True)
class Leaf:
    """One stored tensor, under its name in the checkpoint: `weight`, `weight_scale`, `qweight`, ..."""

    name: str
    dtype: torch.dtype  # a tensor of integers or 8 bits must have it; other floating ones are converted
    dims: tuple[Dim, ...]
    any_shape: bool = False  # its numbers lie in this order, but under another shape
    dummy: float | None = None  # what `load_format: dummy` fills it with; None: random numbers, or bits

    @property
    def output(self) -> tuple[int, Dim] | None:
        """The dimension of the outputs, and its number."""
        return next(((n, dim) for n, dim in enumerate(self.dims) if dim.axis == "output"), None)
