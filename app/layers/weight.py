"""Parameters that know how to take their share of a checkpoint's tensor (tensor parallelism lives here).

The loader walks the parameters and asks each for the names it is filled from; so it knows no layer names, and a
layer that fuses several checkpoint tensors says so where it fuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn


class CheckpointTensor(Protocol):
    """One tensor of a checkpoint, read only as far as it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type it is stored in."""
        ...

    def reshaped(self, *shape: int) -> CheckpointTensor:
        """The same numbers in the same order under another shape."""
        ...

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Read `length` entries from `start` along `dim`, now: for what cannot be read in place."""
        ...

    def read_into(self, target: torch.Tensor, dim: int = 0, start: int = 0) -> None:
        """Have the entries from `start` along `dim`, as many as `target` has there, read into `target`, which is a view
        of a parameter. It may be filled later, by the threads of a `Reader`; here it is at once."""
        target.copy_(self.narrow(dim, start, target.shape[dim]))


# Asks for this rank's share of the tensor to be read into the parameter; shard_id says which part of a fused parameter
# it is. What it writes itself must be places of the parameter that it has nothing read into.
WeightLoader = Callable[["Weight", CheckpointTensor, str], None]


class ShapeMismatch(Exception):
    """The checkpoint's tensor has another shape or type than the model expects; the loader adds the tensor's name."""


@dataclass(slots=True, frozen=True)
class WeightSpec:
    """Says how a parameter is filled."""

    loader: WeightLoader
    # Sibling names in the checkpoint for a fused parameter ("q_proj", ...); empty: the parameter's own name.
    parts: tuple[str, ...] = ()
    leaf: str = ""  # its name in the checkpoint, where that is not the attribute's
    dummy: float | None = None  # what it is filled with where there is no checkpoint; None: random numbers


class Weight(nn.Parameter):
    """A parameter with its `weight_loader`."""

    spec: WeightSpec

    def __new__(cls, data: torch.Tensor, spec: WeightSpec) -> Weight:
        """Wrap `data`, which is not copied."""
        weight = super().__new__(cls, data, requires_grad=False)
        weight.spec = spec
        return weight

    def weight_loader(self, tensor: CheckpointTensor, shard_id: str = "") -> None:
        """Have this rank's share of `tensor` read into the parameter; ShapeMismatch when it cannot be a share of it."""
        self.spec.loader(self, tensor, shard_id)

    def materialize(self, device: torch.device) -> Weight:
        """An uninitialised twin on `device` (the model is built on the meta device)."""
        # Not empty_like: for a meta tensor that imports sympy, a second of every worker's start.
        return Weight(torch.empty(self.shape, dtype=self.dtype, device=device), self.spec)


def expect_shape(tensor: CheckpointTensor, *shape: int) -> None:
    """Raise ShapeMismatch unless `tensor` has this shape."""
    if tuple(tensor.shape) != shape:
        raise ShapeMismatch(f"has shape {list(tensor.shape)}, the model expects {list(shape)}")


def expect_dtype(tensor: CheckpointTensor, dtype: torch.dtype) -> None:
    """Raise ShapeMismatch unless `tensor` holds what a parameter of `dtype` takes: other floating numbers are
    converted, codes of few bits are not."""
    is_code = not dtype.is_floating_point or dtype.itemsize == 1
    if tensor.dtype != dtype if is_code else not tensor.dtype.is_floating_point:
        stored, expected = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, dtype))
        raise ShapeMismatch(f"holds {stored}, the model expects {expected}")


def load_replicated(weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
    """Every rank holds the whole tensor."""
    expect_shape(tensor, *weight.shape)
    tensor.read_into(weight.data)


REPLICATED = WeightSpec(load_replicated)
