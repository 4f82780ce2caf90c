"""Adds adapters to the products of layers."""

from __future__ import annotations

from typing import Any

import torch

from app.kernels.gemm import Inputs, LinearOps
from app.kernels.lora import AdaptedWeight, ExpertMatrices, LoraOps, SlotMatrices, SlotRows
from app.layers.delta import Delta, PairDelta


class AdapterStep:
    """The step that is being computed, as far as adapters go; all layers share it."""

    def __init__(self) -> None:
        self.rows: SlotRows | None = None  # of its tokens; None: no row has an adapter
        self.slots: torch.Tensor | None = None  # int32 [T] of the same tokens
        self.head_rows: SlotRows | None = None  # of the rows that the next call of a head has; None: as above


class LayerDelta(Delta):
    """The low-rank products of one layer, and what changes beside them."""

    def __init__(self, matrices: SlotMatrices, ops: LoraOps, step: AdapterStep) -> None:
        self.ops = ops.linear if matrices.changes is None else ops.changed
        self._lora_ops = ops
        self._matrices = matrices
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
        return self._added(x, y, self._step.rows)

    def _added(self, x: Inputs, y: torch.Tensor, rows: SlotRows) -> torch.Tensor:
        return self._changed(self._lora_ops.add_products(x, self._matrices, rows, y, in_place=True), rows)

    def _changed(self, y: torch.Tensor, rows: SlotRows) -> torch.Tensor:
        changes = self._matrices.changes
        return y if changes is None else self._lora_ops.change(y, changes, rows)


class TableDelta(LayerDelta):
    """The same of an embedding."""

    def _added(self, x: Inputs, y: torch.Tensor, rows: SlotRows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._changed(self._lora_ops.add_looked_up(x, self._matrices, rows, y), rows)


class HeadDelta(LayerDelta):
    """The same of an output head or a classifier, which reads some rows of the step, or none of its tokens: those that
    were said to come, and no others (a proposer of drafts may use the head, too)."""

    @property
    def is_wanted(self) -> bool:
        """See Delta."""
        return self._step.head_rows is not None

    def add(self, x: Inputs, y: torch.Tensor) -> torch.Tensor:
        """See Delta."""
        rows = self._step.head_rows
        assert rows is not None
        return self._added(x, y, rows)


class ExpertDelta(PairDelta):
    """The low-rank products of one product of experts."""

    def __init__(self, matrices: ExpertMatrices, ops: LoraOps, step: AdapterStep) -> None:
        self._add = ops.add_expert_products
        self._matrices = matrices
        self._step = step

    @property
    def is_wanted(self) -> bool:
        """See PairDelta."""
        return self._step.rows is not None

    def add(self, x: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See PairDelta."""
        assert self._step.slots is not None
        return self._add(x, self._step.slots[tokens], experts, self._matrices, y)
