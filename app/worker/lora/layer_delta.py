"""Adds adapters to the products of linear layers."""

from __future__ import annotations

from typing import Any

import torch

from app.kernels.gemm import Inputs, LinearOps
from app.kernels.lora import AdaptedWeight, LoraOps, SlotMatrices, SlotRows
from app.layers.delta import Delta


class AdapterStep:
    """The step that is being computed, as far as adapters go; all layers share it."""

    def __init__(self) -> None:
        self.rows: SlotRows | None = None  # None: no row has one


class LayerDelta(Delta):
    """The low-rank products of one layer."""

    def __init__(self, matrices: SlotMatrices, ops: LoraOps, step: AdapterStep) -> None:
        self.ops = ops.linear
        self._matrices = matrices
        self._add = ops.add_products
        self._step = step

    @property
    def is_wanted(self) -> bool:
        """See Delta."""
        return self._step.rows is not None

    def over(self, ops: LinearOps[Any], weight: Any) -> AdaptedWeight:
        """See Delta."""
        assert self._step.rows is not None
        return AdaptedWeight(ops, weight, self._matrices, self._step.rows)

    def add(self, x: Inputs, y: torch.Tensor) -> torch.Tensor:
        """See Delta."""
        assert self._step.rows is not None
        return self._add(x, self._matrices, self._step.rows, y, in_place=True)
