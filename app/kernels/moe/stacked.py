"""Experts' weights that are packed each as a linear layer's would be, their tensors stacked: one for each expert behind
the other, as a kernel over all experts reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeGuard, cast

import torch

from app.kernels.gemm import PackedWeight
from app.kernels.gemm.group import GroupWeight, made_alike
from app.kernels.gemm.parts import UnpackedWeight
from app.kernels.moe import MoEOps


@dataclass(slots=True, frozen=True)
class StackedExperts:
    """`PackedExperts` of any weight of app/kernels/gemm that is a dataclass of tensors and can be dequantized."""

    packed: Any  # such a weight, but every tensor in it has a leading dimension of experts
    shape: tuple[int, int, int]  # (E, N, K)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of `packed`."""
        return list(_tensors(self.packed))

    def dequantize(self, expert: int) -> torch.Tensor:
        """See PackedExperts."""
        return cast("torch.Tensor", self.one(expert).dequantize())

    def one(self, expert: int) -> Any:
        """Its weight alone, in the same memory."""
        return _mapped(lambda tensors: tensors[0][expert], [self.packed])

    def put(self, expert: int, weight: PackedWeight) -> None:
        """Another weight, packed alike, in its place."""
        for tensor, new in zip(self.tensors, _tensors(weight), strict=True):
            tensor[expert].copy_(new)


def is_stackable(packed: PackedWeight | None) -> TypeGuard[PackedWeight]:
    """Tells whether a weight can be one of StackedExperts: not in an order of a library's own."""
    if not is_dataclass(packed) or not hasattr(packed, "dequantize"):
        return False
    return not any(tensor.is_mkldnn for tensor in _tensors(packed))


def stack_experts(weights: Sequence[PackedWeight], dtype: torch.dtype, ops: MoEOps) -> StackedExperts | torch.Tensor:
    """Weights [N, K] of experts as one; dequantized, [E, N, K] in `dtype`, where they are packed in unlike ways or
    `ops` do not multiply by them as they are."""
    groups = [one for one in weights if isinstance(one, GroupWeight)]
    weights = made_alike(groups) if groups and len(groups) == len(weights) else weights
    first: Any = weights[0]
    if all(isinstance(one, UnpackedWeight) for one in weights):
        return torch.stack([cast("UnpackedWeight", one).weight for one in weights])
    if is_dataclass(first) and all(_is_like(first, other) for other in weights[1:]):
        n, k = cast("Any", weights[0]).dequantize().shape
        stacked = StackedExperts(_mapped(torch.stack, weights), (len(weights), n, k))
        if ops.serves(stacked):
            return stacked
    return torch.stack([cast("Any", one).dequantize().to(dtype) for one in weights])


def _is_like(a: Any, b: Any) -> bool:
    """True if two packed weights differ in the numbers of their tensors only."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
    if is_dataclass(a):
        return type(a) is type(b) and all(_is_like(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_is_like, a, b))
    return bool(a == b)


def _mapped(make: Callable[[list[torch.Tensor]], torch.Tensor], weights: Sequence[Any]) -> Any:
    """Like the first of them, each tensor exchanged for what `make` makes of theirs."""
    first = weights[0]
    if isinstance(first, torch.Tensor):
        return make(list(weights))
    if isinstance(first, tuple):
        return tuple(_mapped(make, list(column)) for column in zip(*weights, strict=True))
    if is_dataclass(first) and not isinstance(first, type):
        each = {f.name: _mapped(make, [getattr(one, f.name) for one in weights]) for f in fields(first) if f.init}
        return replace(first, **each)
    return first


def _tensors(packed: Any) -> Iterator[torch.Tensor]:
    if isinstance(packed, torch.Tensor):
        yield packed
    elif isinstance(packed, tuple):
        for one in packed:
            yield from _tensors(one)
    elif is_dataclass(packed):
        for f in fields(packed):
            yield from _tensors(getattr(packed, f.name))
