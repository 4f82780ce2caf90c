"""All layers of a decoder in one launch, for a step of few rows that bring one token each: the contract.

Such a step is bound by reading weights once, and between two launches the memory rests. One launch for all
layers reads the next weights while programs wait for each other. It serves layers of one kind alone; what it does not
serve is computed layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from app.kernels.gemm.stored import StoredTiles
from app.kernels.kernel_table import HOPPER, TRITON, Candidate, KernelTable, Needs
from app.kernels.moe import GLU
from app.kernels.moe.stacked import StackedExperts


@dataclass(slots=True, frozen=True)
class StepExperts:
    """Says which experts a token goes to: those with the highest scores, which are products with the router's rows,
    rounded to the type of x; of equal scores the one with the lower number. Weights are a softmax."""

    count: int
    chosen: int
    weighs_chosen: bool  # over the scores of the chosen alone; else over all
    rounds_weights: bool  # to the type of x
    activation: GLU = field(default_factory=GLU)


@dataclass(slots=True, frozen=True)
class StepShape:
    """Says what all layers have in common: x + attention(norm(x)), then x + down(silu(gate) * up) of norm(x)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of each expert, where there are any
    eps: float  # of all norms
    scale: float  # of scores
    norms_heads: bool  # whether queries and keys are normed before they are rotated
    experts: StepExperts | None = None  # None: every token goes through the same gate, up and down
    has_biases: bool = False  # whether all products have one, the router's and the experts' among them
    has_sinks: bool = False  # whether heads have one
    has_windows: bool = False  # whether some layers see the newest tokens alone


StepWeight = torch.Tensor | StoredTiles | StackedExperts  # in the type of x, or stored; the last of all experts


@dataclass(slots=True, frozen=True)
class StepBiases:
    """Holds what a layer's products add, of the type of x."""

    qkv: torch.Tensor  # [(heads + 2 kv_heads) head_dim]
    output: torch.Tensor  # [hidden]
    router: torch.Tensor  # [experts]
    gate_up: torch.Tensor  # [experts, 2 intermediate]
    down: torch.Tensor  # [experts, hidden]


@dataclass(slots=True, frozen=True)
class StepLayer:
    """A layer's tensors; what is no weight is of the type of x."""

    norm: torch.Tensor  # [hidden], before attention
    qkv: StepWeight  # [(heads + 2 kv_heads) head_dim, hidden]
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None
    output: StepWeight  # [hidden, heads head_dim]
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: StepWeight  # [2 intermediate, hidden]; of experts one behind the other, as down
    down: StepWeight  # [hidden, intermediate]
    cache: torch.Tensor  # [B, 2, kv_heads, S, head_dim]
    router: torch.Tensor | None = None  # [experts, hidden]
    biases: StepBiases | None = None
    sinks: torch.Tensor | None = None  # fp32 [heads]: logits of a key that every token sees, whose value is 0
    window: int | None = None  # tokens that are seen, the step's own among them; None: all
    group: int = 0  # its blocks are the token's (0), or those of `StepToken.more`


@dataclass(slots=True, frozen=True)
class StepToken:
    """Says where each row's token stands; as an attention backend's metadata says it."""

    cos: torch.Tensor  # [rows, .., head_dim], numbers of the type of x
    sin: torch.Tensor  # the same, the first half negated
    slot: torch.Tensor  # int64 [rows], below 0: its key and value are not written
    seq_len: torch.Tensor  # int32 [rows], itself included; 0: the row pads the step
    blocks: torch.Tensor  # int32 [rows, M]
    more: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()  # slot and blocks of further groups of layers


class WholeStep(Protocol):
    """Computes all layers of a step of few rows."""

    def longest_with(self, weight: StepWeight, rows: int) -> int | None:
        """Tokens of a row's context, its own among them, up to which this is quicker than a layer after the other for
        so many rows where weights have this one's form; 0: it does not serve them, None: any."""

    def run(self, x: torch.Tensor, layers: Sequence[StepLayer], token: StepToken) -> torch.Tensor | None:
        """x [rows, hidden], which may be overwritten -> what the last layer gives; None: it does not serve them."""


# (shape, device) -> what computes such a step; None: it serves no such shape.
MakeWholeStep = Callable[[StepShape, torch.device], WholeStep | None]
WHOLE_STEPS: KernelTable[MakeWholeStep] = KernelTable(
    "whole steps",
    Candidate("app.kernels.whole_step.persistent:make", Needs(TRITON.kernels, generations=HOPPER.generations)),
    Candidate("app.kernels.whole_step.with_sinks:make", Needs(TRITON.kernels, generations=HOPPER.generations)),
)
