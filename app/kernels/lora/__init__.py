"""Low-rank products that a step's rows add to a linear layer's (LoRA: Hu et al., 2021), each row with the adapter in
its slot: the contract that every device keeps.

A layer's matrices of all slots lie in one pool, in tiles of TILE_RANK ranks: an adapter of few ranks is few tiles,
wherever its slot lies, and no kernel reads further. `rows_by_slot` sorts a step's tokens once for all layers, so that
tokens of one adapter share the reading of its matrices. Nothing is added atomically: a token's sum has one order, which
its neighbours do not change (I6), and tokens without an adapter are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from app.kernels.gemm import Inputs, LinearOps
from app.kernels.kernel_table import TRITON, Candidate, KernelTable

TILE_RANK = 16
NO_SLOT = -1  # of a token without an adapter


@dataclass(slots=True, frozen=True)
class SlotChanges:
    """Changes N outputs of a layer beside the products of the adapters in S slots: y becomes y * factor + shift."""

    factors: torch.Tensor  # fp32 [S, N]
    shifts: torch.Tensor  # fp32 [S, N]


@dataclass(slots=True, frozen=True)
class SlotMatrices:
    """The matrices of one linear layer in all S slots."""

    first: torch.Tensor  # [S, tiles, P, TILE_RANK, K], of each of P parts
    second: torch.Tensor  # [S, tiles, N, TILE_RANK], the parts' outputs one behind the other
    num_tiles: torch.Tensor  # int32 [S] that the slot's adapter has
    part_sizes: tuple[int, ...]  # outputs of each part, N together
    part_tiles: torch.Tensor | None = None  # int32 [n, 3] (begin, end, part): the outputs, in pieces for the kernel
    changes: SlotChanges | None = None  # None: products are all that adapters add


@dataclass(slots=True, frozen=True)
class ExpertMatrices:
    """The matrices of one product of E experts in all S slots."""

    first: torch.Tensor  # [S, tiles, E, P, TILE_RANK, K], of each of P parts
    second: torch.Tensor  # [S, tiles, E, N, TILE_RANK], the parts' outputs one behind the other
    num_tiles: torch.Tensor  # int32 [S] that the slot's adapter has
    part_sizes: tuple[int, ...]  # outputs of each part of an expert, N together


class SlotRows(Protocol):
    """A step's tokens, sorted by their slots."""


class RowsBySlot(Protocol):
    """Sorts the tokens of a step."""

    def __call__(self, slots: torch.Tensor, num_tiles: torch.Tensor, most_tiles: int) -> SlotRows:
        """slots int32 [T]: of each token, or NO_SLOT; num_tiles: see SlotMatrices."""


class AddProducts(Protocol):
    """Adds the low-rank products."""

    def __call__(
        self, x: Inputs, matrices: SlotMatrices, rows: SlotRows, y: torch.Tensor, *, in_place: bool
    ) -> torch.Tensor:
        """y [T, N] + (x first^T) second^T of each token's slot; `in_place`: y may be overwritten. x [T, K]."""


class AddLookedUp(Protocol):
    """Adds low-rank products of rows that choose one input each: an embedding's."""

    def __call__(self, inputs: torch.Tensor, matrices: SlotMatrices, rows: SlotRows, y: torch.Tensor) -> torch.Tensor:
        """y [T, N], which is overwritten, + first[:, input] second^T of each token's slot, of one part. inputs int [T];
        below 0: nothing is added."""


class AddExpertProducts(Protocol):
    """Adds the low-rank products of rows that each go through one expert."""

    def __call__(
        self, x: torch.Tensor, slots: torch.Tensor, experts: torch.Tensor, matrices: ExpertMatrices, y: torch.Tensor
    ) -> torch.Tensor:
        """y [n, N], which is overwritten, + (x first^T) second^T of each row's slot and expert. x [n, K]; slots and
        experts int [n]: nothing is added where one is below 0, or an expert is none of the E."""


class Change(Protocol):
    """Multiplies and shifts what stands."""

    def __call__(self, y: torch.Tensor, changes: SlotChanges, rows: SlotRows) -> torch.Tensor:
        """The first N columns of y [T, N or more], which is overwritten, as the slot of each token says; see
        SlotChanges."""


class PartTiles(Protocol):
    """Cuts a layer's outputs into what one program computes."""

    def __call__(self, part_sizes: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
        """See SlotMatrices.part_tiles."""


@dataclass(slots=True, frozen=True)
class AdaptedWeight:
    """A weight, of whatever kind its `ops` multiply by, and what the step's tokens add to its products."""

    ops: LinearOps[Any]
    weight: Any
    matrices: SlotMatrices
    rows: SlotRows


@dataclass(slots=True, frozen=True)
class LoraOps:
    """A device's implementation."""

    rows_by_slot: RowsBySlot
    add_products: AddProducts  # to a product that stands
    linear: LinearOps[AdaptedWeight]  # with the product itself, and what follows it
    changed: LinearOps[AdaptedWeight]  # the same of matrices with `changes`
    add_looked_up: AddLookedUp
    add_expert_products: AddExpertProducts
    change: Change
    part_tiles: PartTiles


LORA_OPS: KernelTable[LoraOps] = KernelTable(
    "low-rank adapters",
    Candidate("app.kernels.lora.triton_ops:OPS", TRITON),
    Candidate("app.kernels.lora.reference:OPS"),
)
