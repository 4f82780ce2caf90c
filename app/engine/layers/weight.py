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
    """The checkpoint's tensor has another shape than the model expects; the loader adds the tensor's name."""


@dataclass(slots=True, frozen=True)
class WeightSpec:
    """How a parameter is filled."""

    loader: WeightLoader
    # Sibling names in the checkpoint for a fused parameter ("q_proj", ...); empty: the parameter's own name.
    parts: tuple[str, ...] = ()


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


def load_replicated(weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
    """Every rank holds the whole tensor."""
    expect_shape(tensor, *weight.shape)
    tensor.read_into(weight.data)


REPLICATED = WeightSpec(load_replicated)
