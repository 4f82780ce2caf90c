"""All layers of latent attention and experts in one launch, for a step of one token: the contract.

As in `WholeStep`, but the cache keeps latents, and some experts are every token's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from app.kernels.kernel_table import HOPPER, TRITON, Candidate, KernelTable, Needs
from app.kernels.whole_step import StepToken


@dataclass(slots=True, frozen=True)
class LatentShape:
    """Says what all layers have in common: x + attention(norm(x)), then x + experts(norm(x)). Experts are chosen by
    products with the router's rows in fp32, the highest first, of equal ones the one with the lower number; their
    weights are a softmax over all."""

    hidden: int
    heads: int
    nope: int  # of a head's query and key, what does not rotate
    rope: int  # what does; its pairs lie together
    value: int  # of a head
    rank: int  # of a latent
    eps: float  # of the layers' norms
    latent_eps: float  # of latents' norms
    scale: float  # of scores
    intermediate: int  # of each expert
    experts: int  # that are chosen from
    chosen: int
    shared: int  # behind these, which every token goes to with weight 1


@dataclass(slots=True, frozen=True)
class LatentLayer:
    """A layer's tensors, all of the type of x."""

    norm: torch.Tensor  # [hidden], before attention
    inputs: torch.Tensor  # [heads (nope + rope) + rank + rope, hidden]: queries, then the latent and its rotated key
    latent_norm: torch.Tensor  # [rank]
    up: torch.Tensor  # [heads, nope + value, rank]: of each head its key, then its value
    output: torch.Tensor  # [hidden, heads value]
    mlp_norm: torch.Tensor  # [hidden]
    router: torch.Tensor  # [experts, hidden]
    gate_up: torch.Tensor  # [experts + shared, 2 intermediate, hidden]
    down: torch.Tensor  # [experts + shared, hidden, intermediate]
    cache: torch.Tensor  # [B, S, rank + rope]


class LatentStep(Protocol):
    """Computes all layers of a step of one token."""

    @property
    def longest(self) -> int | None:
        """Tokens of context, the step's own among them, up to which this is quicker than a layer after the other."""

    def serves(self, x: torch.Tensor, layers: Sequence[LatentLayer]) -> bool:
        """True if it computes these, as they lie, for an x of this type."""

    def run(self, x: torch.Tensor, layers: Sequence[LatentLayer], token: StepToken) -> torch.Tensor:
        """x [1, hidden], which may be overwritten -> what the last of the layers, which it serves, gives."""


# (shape, device) -> what computes such a step; None: it serves no such shape.
MakeLatentStep = Callable[[LatentShape, torch.device], LatentStep | None]
LATENT_STEPS: KernelTable[MakeLatentStep] = KernelTable(
    "whole steps of latents",
    Candidate("app.kernels.whole_step.persistent_latents:make", Needs(TRITON.kernels, generations=HOPPER.generations)),
)
