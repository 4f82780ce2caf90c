"""Mixture-of-experts layers: the contract that every device keeps.

A gate scores the experts for each token, a few of them are chosen and weighed (`Routing`), each token's row goes
through its experts' feed-forward layers (`ExpertRows`), and the rows of a token are summed with their weights,
the output of layers that every token goes through, and the residual stream. Sums have a fixed order and use no atomics
(I6). On a GPU nothing waits for a value on the device, and every buffer has the size of its bound, so all of it can be
captured in a CUDA graph. `reference.py` is the plain PyTorch truth and the CPU path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch

from app.kernels.fused import GatedActivation
from app.kernels.gemm import Activations
from app.kernels.kernel_table import HOPPER, HOST, TRITON, Candidate, KernelTable

# How logits become weights. "softmax": over all experts. "sigmoid": of each alone (DeepSeek-V3). "softmax_of_chosen":
# over the chosen experts' logits (GPT-OSS, Granite). "sparsemixer": the inference rule of SparseMixer (Liu et al.,
# arXiv 2409.12136, Phi-3.5-MoE): each choice by a softmax over the logits near the largest one that is left.
Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen", "sparsemixer"]
# What a group of experts is worth: its best expert (DeepSeek-V2), or its best two together (V3).
GroupScore = Literal["max", "top2"]
LEAST_SUM = 1e-20  # added before a division by the sum of weights, as DeepSeek-V3 does


@dataclass(slots=True, frozen=True)
class RoutingRule:
    """Says how a token's experts follow from its logits. Where scores are equal the lower index wins.

    In this order: round the logits; score; keep the best groups and choose `top_k`, best first, by score + correction
    (with neither groups nor a correction by the logits, whose order is the same); weigh by the scores without
    correction; renormalize; scale; round.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False  # weights / their sum
    scale: float = 1.0
    num_groups: int = 1
    groups_chosen: int = 1
    group_score: GroupScore = "max"
    # Logits and weights are rounded to these types; None: they stay fp32.
    logits_dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    jitter: float = 0.0  # of "sparsemixer": relative distance of the logits that count is at most 2 * jitter
    # Experts behind the E scored ones, that every token goes through with weight 1: ids E, E + 1, ... come last.
    num_shared: int = 0
    gates_shared: bool = False  # their weight is the sigmoid of one more logit, behind the E, rounded as these are

    @property
    def num_chosen(self) -> int:
        """Experts of a token."""
        return self.top_k + self.num_shared


class Routing(NamedTuple):
    """The experts of each token. Id -1: routed nowhere (pad rows, experts of other ranks); its weight means nothing."""

    ids: torch.Tensor  # int32 [T, K]
    weights: torch.Tensor  # fp32 [T, K]


@dataclass(slots=True, frozen=True)
class GLU:
    """f(g) * (u + up_offset) with f(g) = g * sigmoid(alpha * g) or a GELU; g = min(gate, limit), u = up within +-limit.

    SiLU has alpha 1; GPT-OSS limit 7, alpha 1.702, up_offset 1. Without a gate are "relu2": max(u, 0)^2 (So et al.,
    2021), and "plain_gelu": gelu(u).
    """

    function: GatedActivation | Literal["relu2", "plain_gelu"] = "silu"
    limit: float | None = None
    alpha: float = 1.0  # of silu
    up_offset: float = 0.0

    @property
    def has_gate(self) -> bool:
        """True if an expert's first product has gate's rows above up's."""
        return self.function not in ("relu2", "plain_gelu")


class PackedExperts(Protocol):
    """Experts' weights [E, N, K] in a kernel's own form, made of a packed weight of app/kernels/gemm with a leading
    dimension of experts."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        ...

    def dequantize(self, expert: int) -> torch.Tensor:
        """The expert's weight in fp32 [N, K]: the truth."""
        ...


@dataclass(slots=True, frozen=True)
class ExpertWeights:
    """All experts of this rank. Gate's I rows come first, then up's: what a checkpoint interleaves is reordered when it
    is loaded."""

    gate_up: torch.Tensor | PackedExperts  # [E, 2 I, C]; without a gate up alone, [E, I, C]
    down: torch.Tensor | PackedExperts  # [E, C, I]
    activation: GLU = field(default_factory=GLU)
    gate_up_bias: torch.Tensor | None = None  # [E, 2 I], or as many
    down_bias: torch.Tensor | None = None  # [E, C]
    weighs_input: bool = False  # a routing weight multiplies what its expert reads, not what it gives (Llama 4)
    num_shared: int = 0  # of the last experts: every token goes to them


class AddToRows(Protocol):
    """Adds to a product of rows what adapters make of the same rows."""

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [n, N], which is overwritten, + what x [n, K] gives: of these tokens int64 [n], each through one of the
        experts int32 [n] of this rank (-1: none)."""


class ExpertRows(ABC):
    """Holds what the chosen experts gave, not summed yet. Each method sums it anew: in fp32 over the token's experts in
    the order of its ids, then `shared`, rounded once."""

    shared: torch.Tensor | None = None  # [T, C] of layers that every token went through; may be set before the sum

    @abstractmethod
    def materialize(self) -> torch.Tensor:
        """sum_k weights[:, k] * rows[:, k] + shared: [T, C] in the dtype of x; zeros for a token routed nowhere."""

    @abstractmethod
    def add_norm(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, may_defer: bool
    ) -> tuple[Activations, torch.Tensor]:
        """(rms_norm(s) * norm_weight, s), both [T, C], with s = the sum, rounded, + residual. `may_defer`: the norm's
        reader takes a `DeferredNorm`."""


class RouteOp(Protocol):
    """Choosing experts by logits."""

    def __call__(
        self,
        logits: torch.Tensor,
        rule: RoutingRule,
        *,
        correction: torch.Tensor | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> Routing:
        """logits [T, E], or [T, E + 1] where the rule gates shared experts; correction fp32 [E], added to scores for
        choosing only; slot_mapping int64 [T]: rows whose slot is negative are padding and go nowhere."""


class GateOp(Protocol):
    """The gate's product, and choosing experts by it."""

    def __call__(
        self,
        x: Activations,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rule: RoutingRule,
        *,
        correction: torch.Tensor | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> Routing:
        """x [T, C], weight [E, C], bias [E], with one row more where the rule gates shared experts, which then have no
        bias; the product in fp32, whatever they are stored in."""


class SlotsOp(Protocol):
    """Tells which of the chosen experts this rank holds, and where."""

    def __call__(
        self,
        ids: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """ids int32 [T, K], table int32 [E, W] -> int32 [T, K]: table[id, position % W], without positions int64 [T]
        table[id, 0]; -1 for id -1. counts int64 [E] grow by one for each id."""


class ExpertsOp(Protocol):
    """Grouped products."""

    def __call__(self, x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertRows:
        """x [T, C] through the experts that `routing` names."""


class AdaptedExpertsOp(Protocol):
    """Grouped products to which adapters add."""

    def __call__(
        self, x: Activations, routing: Routing, weights: ExpertWeights, gate_up: AddToRows, down: AddToRows
    ) -> ExpertRows:
        """The same as ExpertsOp, with what is added to the first product before its weights, bias and activation, and
        to the second. Rows to which nothing is added are the same, but for the rounding of an activation that is a
        launch of its own."""


@dataclass(slots=True, frozen=True)
class MoEOps:
    """One implementation."""

    route: RouteOp
    gate: GateOp
    experts: ExpertsOp
    adapted: AdaptedExpertsOp
    to_slots: SlotsOp
    # Whether `experts` multiplies by weights in this form; others are dequantized when they are loaded.
    serves: Callable[[PackedExperts], bool] = lambda _: False


MOE_OPS: KernelTable[MoEOps] = KernelTable(
    "experts",
    Candidate("app.kernels.moe.exact:OPS", HOST, is_exact=True),
    Candidate("app.kernels.moe.triton_exact:OPS", HOPPER, is_exact=True),
    Candidate("app.kernels.moe.triton_ops:OPS", TRITON),
    Candidate("app.kernels.moe.reference:OPS"),
)
