"""Sums and norms that are made in one kernel with the product before them, although transformers' code writes them as
steps of their own.

A product whose result only goes into a residual sum that only a norm of ours reads need not be made when it is called:
it comes as a `Deferred`, the sum as a `Sum`, and the norm makes all three. Both stand for their tensors: whoever asks
anything else of them gets the tensor. Which products are worth it, a trace finds out (`Site`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from app.kernels.gemm import Activations, DeferredNorm
from app.layers.epilogue import PLAIN, AddNorm, Epilogue
from app.layers.norm import Norm

Product = Callable[[Epilogue[Any]], Any]  # runs with what follows it


class Site:
    """A place in the model whose results may be deferred."""

    def __init__(self) -> None:
        self.tries = True  # while the model is traced
        self.pays = False  # a norm took a sum with it

    def settle(self) -> None:
        """The trace is over: go on only with what it has shown to be of use."""
        self.tries = self.pays

    def result(self, product: Product, shape: torch.Size, like: torch.Tensor) -> Any:
        """Returns what the product gives, of this shape, or what stands for it; `like` says type and device."""
        deferred = Deferred(self, product, shape, like)
        return deferred if self.tries else deferred.value()


class StandIn(ABC):
    """Stands for a tensor."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._value: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """The tensor, made once."""
        if self._value is None:
            self._value = self._make()
        return self._value

    @abstractmethod
    def _make(self) -> torch.Tensor:
        """The tensor."""

    def _meta(self) -> torch.Tensor | None:
        return torch.empty(self.shape, dtype=self.dtype, device="meta") if self.device.type == "meta" else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in ("add", "__add__", "__radd__") and len(args) == 2 and not kwargs:
            return _sum(*args)
        args, kwargs = tree_map(tensor_of, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __add__(self, other: Any) -> Any:
        return _sum(self, other)

    def __radd__(self, other: Any) -> Any:
        return _sum(other, self)


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *others: getattr(self.value(), name)(*map(tensor_of, others))


for _name in (
    "mul",
    "rmul",
    "sub",
    "rsub",
    "truediv",
    "rtruediv",
    "pow",
    "matmul",
    "neg",
    "getitem",
    "len",
    "iter",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
):
    setattr(StandIn, f"__{_name}__", _forward(f"__{_name}__"))


class Deferred(StandIn):
    """A product."""

    def __init__(self, site: Site, product: Product, shape: torch.Size, like: torch.Tensor) -> None:
        super().__init__(shape, like.dtype, like.device)
        self.site, self.product = site, product

    @property
    def is_made(self) -> bool:
        """True if somebody wanted its tensor."""
        return self._value is not None

    def _make(self) -> torch.Tensor:
        meta = self._meta()
        return self.product(PLAIN).view(self.shape) if meta is None else meta


class Sum(StandIn):
    """A residual and a product."""

    def __init__(self, residual: torch.Tensor, deferred: Deferred) -> None:
        super().__init__(deferred.shape, deferred.dtype, deferred.device)
        self._residual, self._deferred = residual, deferred

    def normed(self, norm: Norm) -> Activations:
        """The norm of the sum, rows [T, C]; the sum is made with it."""
        self._deferred.site.pays = True
        if (total := self._meta()) is not None:
            self._value = total
            return total.view(-1, self.shape[-1])
        size = self.shape[-1]
        normed, total = self._deferred.product(AddNorm(self._residual.reshape(-1, size), norm))
        self._value = total.view(self.shape)
        return normed  # type: ignore[no-any-return]

    @property
    def is_open(self) -> bool:
        """True if nothing of it has been made."""
        return self._value is None and not self._deferred.is_made

    def _make(self) -> torch.Tensor:
        return self._residual + self._deferred.value()


class Normed(StandIn):
    """Normed rows as products read them, whose norm may still be to come; while the model is traced, a plain tensor of
    which is noted whether anybody else reads it."""

    def __init__(self, rows: Activations, shape: torch.Size, on_read: Callable[[], None]) -> None:
        tensor = rows.rows if isinstance(rows, DeferredNorm) else rows
        super().__init__(shape, tensor.dtype, tensor.device)
        self.rows, self._on_read = rows, on_read

    def _make(self) -> torch.Tensor:
        self._on_read()
        rows = self.rows
        return (rows.materialize() if isinstance(rows, DeferredNorm) else rows).view(self.shape)


def tensor_of(x: Any) -> Any:
    """The tensor that stands behind x, or x."""
    return x.value() if isinstance(x, StandIn) else x


def rows_of(x: Any) -> Activations:
    """x [..., K] as rows [T, K] for a product."""
    if isinstance(x, Normed):
        return x.rows
    tensor: torch.Tensor = tensor_of(x)
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])


def _sum(a: Any, b: Any) -> Any:
    """a + b, which stays open where one of them is a product of the other's shape and type."""
    for one, other in ((b, a), (a, b)):
        if isinstance(one, Deferred) and not one.is_made and not isinstance(other, Deferred):
            residual = tensor_of(other)
            if isinstance(residual, torch.Tensor) and residual.shape == one.shape and residual.dtype == one.dtype:
                return Sum(residual, one)
    return tensor_of(a) + tensor_of(b)
