"""Linear layers: the contract that every kernel keeps, and which kernel serves a weight.

`LinearOps` are a device's products with weights as they were loaded; those of `reference.py` are the truth. A kernel
that wants a weight in its own order turns a weight [N, K] once, when it is loaded, into a `PackedWeight` that
multiplies any number of rows; whoever packs then drops the weight, so that no second copy stays in memory. Quantized
weights are packed weights, too: each kind is one file with its plain PyTorch truth. A packed weight may bring
`LinearOps` of its own, which take it in place of a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import torch

from app.kernels.fused import FUSED_OPS, GatedActivation, PlainActivation, RankBoxes
from app.kernels.kernel_table import HOPPER, HOST, TRITON, Candidate, KernelTable

# A smaller weight stays in the caches, where the plain product is as fast and costs less to call.
LEAST_PACKED_ELEMENTS = 1 << 18


@dataclass(slots=True, frozen=True)
class DeferredNorm:
    """RMS-normed rows whose division is left to the product that reads them: it divides its result, in fp32."""

    rows: torch.Tensor  # x * the norm's weight, rounded, [T, K]
    squares: torch.Tensor  # sums of x squared, fp32 [T, P], each over some columns
    eps: float

    def materialize(self) -> torch.Tensor:
        """The normed rows [T, K], for a reader that cannot divide its result."""
        mean = self.squares.sum(1, keepdim=True) / self.rows.shape[1]
        return (self.rows.float() * (mean + self.eps).rsqrt()).to(self.rows.dtype)


@dataclass(slots=True, frozen=True)
class NumberKind:
    """Numbers of 8 bits that a product takes in the place of activations."""

    name: Literal["int8", "e4m3"]
    by_blocks: bool = False  # each block of a row has a scale of its own, else the row has one


class QuantizedNorm(DeferredNorm):
    """RMS-normed rows as numbers of 8 bits, for the products that read them: those of many rows whose weights are of
    the kind that made the sum. For any other reader it is a deferred norm, made when it is asked for."""

    __slots__ = ("kind", "norm_weight", "numbers", "scales", "total")

    def __init__(
        self,
        total: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        kind: NumberKind,
        numbers: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """The norm of total [T, K] by norm_weight [K], as numbers and scales of a kind."""
        given = {"total": total, "norm_weight": norm_weight, "eps": eps, "kind": kind}
        for name, value in {**given, "numbers": numbers, "scales": scales}.items():
            object.__setattr__(self, name, value)

    total: torch.Tensor
    norm_weight: torch.Tensor
    kind: NumberKind
    numbers: torch.Tensor
    scales: torch.Tensor

    def __len__(self) -> int:
        """T."""
        return len(self.total)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.total.dtype

    @property
    def device(self) -> torch.device:
        """The device where they are."""
        return self.total.device

    @property
    def rows(self) -> torch.Tensor:
        """See DeferredNorm."""
        return self.total * self.norm_weight

    @property
    def squares(self) -> torch.Tensor:
        """See DeferredNorm."""
        return self.total.float().square().sum(1, keepdim=True)

    def materialize(self) -> torch.Tensor:
        """The normed rows [T, K]."""
        return FUSED_OPS.on(self.total.device).rms_norm(self.total, self.norm_weight, self.eps)


@dataclass(slots=True, frozen=True)
class DeferredActivation:
    """Gate and up side by side, whose activation and product are left to the reader, which quantizes what comes out."""

    gate_up: torch.Tensor  # [T, 2 K]
    activation: GatedActivation

    def __len__(self) -> int:
        """T."""
        return len(self.gate_up)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what comes out."""
        return self.gate_up.dtype

    @property
    def device(self) -> torch.device:
        """The device where it is."""
        return self.gate_up.device

    def materialize(self) -> torch.Tensor:
        """activation(gate) * up, [T, K], for a reader that cannot."""
        return FUSED_OPS.on(self.gate_up.device).act_and_mul(self.gate_up, self.activation)


Activations = torch.Tensor | DeferredNorm  # what follows a norm
Inputs = Activations | DeferredActivation  # what a product reads


def materialize(x: Inputs) -> torch.Tensor:
    """x as a plain tensor [T, K]."""
    return x if isinstance(x, torch.Tensor) else x.materialize()


WeightT = TypeVar("WeightT")  # torch.Tensor [N, K], or a packed weight of those sizes
Product = Callable[[Inputs, WeightT, torch.Tensor | None], torch.Tensor]
# gate and up side by side in one weight: activation(first half) * second half, [T, N / 2], or that left to its reader
GatedRows = torch.Tensor | DeferredActivation
PackedInputs = GatedRows | QuantizedNorm  # what a packed weight's own product reads, of any number of rows
GatedProduct = Callable[[Activations, WeightT, torch.Tensor | None, GatedActivation], GatedRows]
# (x [T, K], weight [N, K], bias [N] or None, residual [T, N], norm's weight [N], eps, whether the norm's reader is one
# of these products) -> (rms_norm(s) * norm's weight, s), where s = the product, rounded, + residual.
ProductThenNorm = Callable[
    [GatedRows, WeightT, torch.Tensor | None, torch.Tensor, torch.Tensor, float, bool],
    tuple[Activations, torch.Tensor],
]
ActivatedProduct = Callable[[Inputs, WeightT, torch.Tensor | None, PlainActivation], torch.Tensor]
# (x [T, K], weight [N, K], bias [N] or None, residual [T, N]) -> the product, rounded, + residual; None: it does not
# serve such rows.
SummedProduct = Callable[[Inputs, WeightT, torch.Tensor | None, torch.Tensor], torch.Tensor | None]


# (boxes, x, weight, bias, residual, norm's weight, eps) -> ProductThenNorm of the product's sum over the ranks, for a
# reader that is one of these products; None: it does not serve such rows. Collective.
SummedProductThenNorm = Callable[
    [RankBoxes, GatedRows, WeightT, torch.Tensor | None, torch.Tensor, torch.Tensor, float],
    tuple[Activations, torch.Tensor] | None,
]


@dataclass(slots=True, frozen=True)
class LinearOps(Generic[WeightT]):
    """Products of x [T, K] with one kind of weight [N, K] and a bias [N] or None, in the dtype of x."""

    linear: Product[WeightT]  # [T, N]
    gated_linear: GatedProduct[WeightT]
    linear_add_norm: ProductThenNorm[WeightT]
    # `linear_add_norm` where products with weights of its kind alone read the norm, which may come as a QuantizedNorm.
    linear_add_numbers: ProductThenNorm[WeightT] | None = None
    # The activation of a product in one launch, or in one behind it; None: there is no such kernel.
    activated_linear: ActivatedProduct[WeightT] | None = None
    # The sum of a product and the residual in one launch; None: there is no such kernel.
    linear_add: SummedProduct[WeightT] | None = None
    # A product, its sum over the ranks and what follows in one launch; None: there is no such kernel.
    linear_sum_norm: SummedProductThenNorm[WeightT] | None = None
    # `linear` where the launch before, another product of x, writes nothing that it reads: they may run side by side.
    linear_beside: Product[WeightT] | None = None
    # The products of layers that may have adapters: rows without one keep their bits beside others; and of those whose
    # weights each step copies in: none of the large ones is read before what came before has ended. None: these.
    beside_adapters: LinearOps[WeightT] | None = None
    goes_by_shape: bool = False  # whether a library chooses how it sums by the weight's shape


LINEAR_OPS: KernelTable[LinearOps[torch.Tensor]] = KernelTable(
    "linear layers",
    Candidate("app.kernels.gemm.fixed_rows:OPS", HOST, is_exact=True),
    Candidate("app.kernels.gemm.triton_fixed:OPS", HOPPER, is_exact=True),
    Candidate("app.kernels.gemm.plain:OPS", replace(HOPPER, kernels=TRITON.kernels)),
    Candidate("app.kernels.gemm.triton_small:OPS", TRITON),
    Candidate("app.kernels.gemm.reference:OPS"),
)


class PackedWeight(ABC):
    """A weight [N, K] in a kernel's own order."""

    __slots__ = ()

    @abstractmethod
    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K] -> x W^T + bias, [T, N], in the dtype of x."""

    def ops_on(self, device: torch.device) -> LinearOps[Any] | None:
        """The products with such a weight; None: there is `linear` alone, and what follows is a launch of its own."""
        return None

    def even(self) -> PackedWeight:
        """The same weight without ways of its own for few rows, where it has some, which round otherwise."""
        return self


# weight [N, K], which is not changed -> the same in the order of a library's products; None: it does not serve such a
# weight, or does not work on this machine, which it may find out by a small product.
Pack = Callable[[torch.Tensor], PackedWeight | None]
GEMM_KERNELS: KernelTable[Pack] = KernelTable("packed products", Candidate("app.kernels.gemm.onednn:pack", HOST))


def pack_weight(weight: torch.Tensor) -> PackedWeight | None:
    """weight [N, K] packed by a kernel that beats the plain product on it; None where there is none."""
    if weight.numel() < LEAST_PACKED_ELEMENTS:
        return None
    packed = (pack(weight) for pack in GEMM_KERNELS.all_on(weight.device))
    return next((one for one in packed if one is not None), None)
