"""Works out what an adapter is beside low-rank products: factors and shifts of the outputs of the base model's layers.

A magnitude m (DoRA: Liu et al., 2024) becomes the factor m / |W + BA| of each output, whose norm is taken once: as
|w|^2 + 2 b (W A^T) + b (A A^T) b^T, of which the layer itself computes W A^T, whatever form its weight has. A bias is a
shift, less what the factor makes of the layer's own. A classifier's whole weight becomes two matrices: the identity,
and what it differs by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from app.checkpoints.adapters.adapter_config import PARAM
from app.errors import CheckpointError
from app.layers.adapted_layer import AdaptedLayer
from app.layers.replicated import ReplicatedLinear
from app.layers.vocab import VocabShard
from app.loading.adapter_changes import LayerChange
from app.worker.lora.slot_pool import HostAdapter, LayerPlace, SlotPool

_SAME_TABLE = 1e-2  # of its largest number: what types may have rounded


class Fitting:
    """Fits adapters to the layers of one rank, whose norms are kept until weights change."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._squares: dict[AdaptedLayer, torch.Tensor] = {}

    def forget(self) -> None:
        """The base model's weights are others from now on."""
        self._squares.clear()

    def fit(self, adapter: HostAdapter) -> None:
        """Work out the adapter's factors and shifts, with the weights that there are. Collective over the ranks that
        share layers. CheckpointError: it holds tables that are not the model's."""
        if adapter.changes is None:
            return
        adapter.changes[0], adapter.changes[1] = 1.0, 0.0
        for change in adapter.held:
            if change.weight is not None:
                self._differ(adapter, change, change.weight)
        for change, norms in zip(*self._norms(adapter), strict=True):
            assert change.magnitude is not None
            self._part(adapter.changes[0], change).copy_(change.magnitude / norms)
        for change in adapter.held:
            self._shift(adapter.changes, change)
        for change in adapter.held:
            if change.base is not None:
                _expect_table(change, change.base)
        adapter.held = [replace(change, base=None) for change in adapter.held]  # it may be a gigabyte

    def _part(self, outputs: torch.Tensor, change: LayerChange) -> torch.Tensor:
        """Those of one part among all layers' outputs [outputs]."""
        place = self._pool.place(change.layer)
        begin = place.outputs + place.start_of(change.part)
        return outputs[begin : begin + place.size_of(change.part)]

    def _differ(self, adapter: HostAdapter, change: LayerChange, weight: torch.Tensor) -> None:
        """Two matrices whose product is what a whole weight [N, K] differs by."""
        assert isinstance(change.layer, ReplicatedLinear)
        first, second = _matrices(adapter.places[change.layer], adapter.rows, change.part)
        differs = weight - change.layer.multiplier.float().cpu()
        for rank, row in enumerate(differs):
            first[rank // first.shape[1], rank % first.shape[1]] = row
            second[rank // first.shape[1], rank, rank % first.shape[1]] = 1.0

    def _norms(self, adapter: HostAdapter) -> tuple[Sequence[LayerChange], Sequence[torch.Tensor]]:
        """The changes with magnitudes, and for each the norms of its outputs' weights with the adapter's, fp32 [N]."""
        changes = [change for change in adapter.held if change.magnitude is not None]
        squares = [self._squared_norms(adapter, change) for change in changes]
        split = [n for n, one in enumerate(changes) if one.layer.input_share.size < one.layer.input_share.whole]
        if split:
            sizes = [len(squares[n]) for n in split]
            summed = changes[split[0]].layer.tp.all_reduce(torch.cat([squares[n] for n in split]))
            for n, one in zip(split, torch.split(summed, sizes), strict=True):
                squares[n] = one
        return changes, [one.clamp_(min=0.0).sqrt_().cpu() for one in squares]

    def _squared_norms(self, adapter: HostAdapter, change: LayerChange) -> torch.Tensor:
        """Over this rank's inputs."""
        layer, place = change.layer, self._pool.place(change.layer)
        if layer not in self._squares:
            self._squares[layer] = layer.squares()
        matrices = _matrices(adapter.places[layer], adapter.rows, change.part)
        first, second = (matrix.to(layer.device) for matrix in matrices)
        first, second = first.flatten(0, 1), second.transpose(0, 1).flatten(1)  # [ranks, K], [N, ranks]
        begin = place.start_of(change.part)
        own = slice(begin, begin + place.size_of(change.part))
        product = layer.multiply(first)[:, own].float().t()  # [N, ranks]
        first, second = first.float(), second.float()
        return self._squares[layer][own] + ((2 * product + second @ (first @ first.t())) * second).sum(1)

    def _shift(self, changes: torch.Tensor, change: LayerChange) -> None:
        layer = change.layer
        if not layer.adds_bias:
            return
        factors, shifts = (self._part(one, change) for one in changes)
        place = self._pool.place(layer)
        begin, size = place.start_of(change.part), place.size_of(change.part)
        own = torch.zeros(size) if layer.bias is None else layer.bias[begin : begin + size].float().cpu()
        shifts.copy_((own if change.bias is None else change.bias) - factors * own)
        if change.second_bias is not None:
            shifts += change.scale * change.second_bias


def _matrices(place: LayerPlace, rows: torch.Tensor, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of one part in the rows of an adapter: [tiles, TILE_RANK, K] and [tiles, N, TILE_RANK]; the same memory."""
    begin = place.start_of(part)
    first = place.firsts(rows)[:, place.parts.index(part)]
    return first, place.seconds(rows)[:, begin : begin + place.size_of(part)]


def _expect_table(change: LayerChange, saved: torch.Tensor) -> None:
    """Refuse a table beside the matrices that is not the model's own, where that is there to be compared."""
    assert isinstance(change.layer, VocabShard)
    table = change.layer.table
    if table.is_meta or not len(saved):
        return
    own = table[: len(saved)].float().cpu()
    if (own - saved.float()).abs().max() > _SAME_TABLE * own.abs().max():
        raise CheckpointError(
            f"{change.module}: base_layer.weight is not the base model's: the adapter changes all of it", param=PARAM
        )
