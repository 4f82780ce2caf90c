"""The memory of a rank's slots: the matrices of all layers of each adapter that steps may compute with.

A slot is rows of TILE_RANK ranks of all layers, one behind the other: an adapter of few ranks is the first of them. In
host memory it has the layers that it changes alone, and goes into its slot in a copy for each run of these. Where
adapters may have more than matrices, a slot has a factor and a shift for each output, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from app.kernels.lora import LORA_OPS, TILE_RANK, ExpertMatrices, LoraOps, SlotChanges, SlotMatrices, SlotRows
from app.layers.adapted_layer import AdaptedLayer
from app.layers.experts.expert_linear import ExpertLinear
from app.loading.adapter_changes import LayerChange
from app.loading.adapters import LayerPair, are_numbers
from app.platforms import platform_of
from app.worker.host_copy import empty


@dataclass(slots=True, frozen=True)
class LayerPlace:
    """Says where a layer's matrices lie in a row of ranks, in numbers."""

    parts: tuple[str, ...]
    part_sizes: tuple[int, ...]
    inputs: int
    first: int
    second: int
    end: int
    outputs: int  # behind so many outputs of other layers

    @classmethod
    def of(cls, layer: AdaptedLayer, begin: int, outputs: int) -> LayerPlace:
        """Behind what ends at `begin`, and so many outputs."""
        sizes = tuple(share.size for share in layer.output_shares.values())
        inputs = layer.input_share.size
        second = begin + len(sizes) * TILE_RANK * inputs
        end = second + sum(sizes) * TILE_RANK
        return cls(tuple(layer.output_shares), sizes, inputs, begin, second, end, outputs)

    @property
    def outputs_end(self) -> int:
        """Outputs of this layer and those before it."""
        return self.outputs + sum(self.part_sizes)

    def moved(self, by: int) -> LayerPlace:
        """The same in other rows, so many numbers further on."""
        return replace(self, first=self.first + by, second=self.second + by, end=self.end + by)

    def start_of(self, part: str) -> int:
        """The first of a part's outputs among the layer's."""
        return sum(self.part_sizes[: self.parts.index(part)])

    def size_of(self, part: str) -> int:
        """Outputs of a part."""
        return self.part_sizes[self.parts.index(part)]

    def firsts(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., P, TILE_RANK, K]: the same memory."""
        return rows[..., self.first : self.second].view(*rows.shape[:-1], len(self.parts), TILE_RANK, self.inputs)

    def seconds(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., N, TILE_RANK]: the same memory."""
        return rows[..., self.second : self.end].view(*rows.shape[:-1], sum(self.part_sizes), TILE_RANK)


@dataclass(slots=True)
class HostAdapter:
    """An adapter in host memory."""

    rows: torch.Tensor  # [tiles, width of its own layers], of which each lies as it will in its slot
    places: Mapping[AdaptedLayer, LayerPlace]  # of its own layers, in these rows
    runs: Sequence[tuple[int, int, int]]  # where numbers lie in a slot's row, where in these, how many
    changes: torch.Tensor | None  # fp32 [2, outputs]: factors and shifts; None: slots have none
    held: list[LayerChange] = field(default_factory=list)  # what those are made of


class SlotPool:
    """Slots for adapters of up to `max_rank` on these layers. `extras`: they have factors and shifts."""

    def __init__(
        self,
        layers: Iterable[AdaptedLayer],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        extras: bool = False,
    ) -> None:
        self._places: dict[AdaptedLayer, LayerPlace] = {}
        end = outputs = 0
        for layer in layers:
            self._places[layer] = place = LayerPlace.of(layer, end, outputs)
            end, outputs = place.end, place.outputs_end
        self._width, self._device = end, device
        self._changes = torch.zeros(num_slots, 2, outputs, device=device) if extras else None
        tiles = -(-max_rank // TILE_RANK)
        self._slots = torch.zeros(num_slots, tiles, end, dtype=dtype, device=device)
        self._num_tiles = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def device(self) -> torch.device:
        """Returns where they lie."""
        return self._slots.device

    @property
    def num_slots(self) -> int:
        """Adapters that have room."""
        return len(self._slots)

    def sorted(self, ops: LoraOps, slots: torch.Tensor) -> SlotRows:
        """A step's tokens by their slots int32 [T]."""
        return ops.rows_by_slot(slots, self._num_tiles, self._slots.shape[1])

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return self._slots.nbytes + (0 if self._changes is None else self._changes.nbytes)

    @property
    def layers(self) -> Sequence[AdaptedLayer]:
        """The layers that have a place."""
        return list(self._places)

    def place(self, layer: AdaptedLayer) -> LayerPlace:
        """Returns where a layer's matrices lie."""
        return self._places[layer]

    def matrices(self, layer: AdaptedLayer) -> SlotMatrices:
        """A layer's, of all slots."""
        place, changes = self._places[layer], None
        if self._changes is not None:
            own = self._changes[:, :, place.outputs : place.outputs_end]
            changes = SlotChanges(own[:, 0], own[:, 1])
        tiles = LORA_OPS.on(self._device).part_tiles(place.part_sizes, self._device)
        first, second = place.firsts(self._slots), place.seconds(self._slots)
        return SlotMatrices(first, second, self._num_tiles, place.part_sizes, tiles, changes)

    def expert_matrices(self, layer: ExpertLinear) -> ExpertMatrices:
        """Those of a product of experts, of all slots."""
        place, num_experts = self._places[layer], len(layer.slots)
        first, second = place.firsts(self._slots), place.seconds(self._slots)
        first = first.view(*first.shape[:2], num_experts, -1, *first.shape[3:])
        second = second.view(*second.shape[:2], num_experts, -1, *second.shape[3:])
        sizes = tuple(share.size for share in layer.part_shares.values())
        return ExpertMatrices(first, second, self._num_tiles, sizes)

    def host_bytes(self, rank: int, layers: Collection[AdaptedLayer]) -> int:
        """Memory of the host that an adapter of this rank takes, which changes these layers."""
        changes = 0 if self._changes is None else self._changes[0].nbytes
        width = sum(place.end - place.first for layer, place in self._places.items() if layer in layers)
        return -(-rank // TILE_RANK) * width * self._slots.dtype.itemsize + changes

    def on_host(self, pairs: Sequence[LayerPair], held: Sequence[LayerChange] = (), rank: int = 1) -> HostAdapter:
        """An adapter of this rank, in host memory that the device copies by itself; its factors and shifts are yet to
        be worked out. CheckpointError names a tensor whose numbers are none."""
        tiles = -(-rank // TILE_RANK)
        pinned = platform_of(self._device).is_async
        places, runs, width = self._own({pair.layer for pair in pairs} | {change.layer for change in held})
        rows = torch.zeros(tiles, width, dtype=self._slots.dtype, pin_memory=pinned)
        for pair in pairs:
            place, rank = places[pair.layer], len(pair.first)
            part = place.parts.index(pair.part)
            start = sum(place.part_sizes[:part])
            for tile in range(-(-rank // TILE_RANK)):
                ranks = slice(tile * TILE_RANK, min((tile + 1) * TILE_RANK, rank))
                count = ranks.stop - ranks.start
                pair.first_into(place.firsts(rows[tile])[part, :count], ranks)
                pair.second_into(place.seconds(rows[tile])[start : start + len(pair.second), :count], ranks)
        if not are_numbers(rows):
            for pair in pairs:
                pair.expect_numbers(rows.dtype)
        changes = None if self._changes is None else torch.zeros(self._changes.shape[1:], pin_memory=pinned)
        return HostAdapter(rows, places, runs, changes, list(held))

    def _own(
        self, layers: Collection[AdaptedLayer]
    ) -> tuple[dict[AdaptedLayer, LayerPlace], list[tuple[int, int, int]], int]:
        """The places of these layers one behind the other, their runs (see HostAdapter), and how wide they are."""
        places: dict[AdaptedLayer, LayerPlace] = {}
        runs: list[tuple[int, int, int]] = []
        width = 0
        for layer, place in self._places.items():
            if layer not in layers:
                continue
            places[layer], size = place.moved(width - place.first), place.end - place.first
            if runs and runs[-1][0] + runs[-1][2] == place.first:
                begin, own, before = runs.pop()
                runs.append((begin, own, before + size))
            else:
                runs.append((place.first, width, size))
            width += size
        return places, runs, width

    def fill(self, slot: int, adapter: HostAdapter) -> None:
        """Put an adapter into a slot, behind all steps that were enqueued: none of them meets another's matrices."""
        rows = self._slots[slot, : len(adapter.rows)]
        if adapter.rows.shape[1] == self._width:
            rows.copy_(adapter.rows, non_blocking=True)
        else:
            rows.zero_()  # of layers that it does not change
            for begin, own, size in adapter.runs:
                for target, source in zip(rows, adapter.rows, strict=True):
                    target[begin : begin + size].copy_(source[own : own + size], non_blocking=True)
        self._num_tiles[slot : slot + 1].fill_(len(adapter.rows))
        if self._changes is not None and adapter.changes is not None:
            self._changes[slot].copy_(adapter.changes, non_blocking=True)

    def free(self) -> None:
        """Give the memory back; the slots' contents are gone."""
        if not self._emptied and platform_of(self._device).is_async:
            held = [self._slots] if self._changes is None else [self._slots, self._changes]
            self._emptied = empty([tensor.untyped_storage() for tensor in held])

    def restore(self) -> bool:
        """Memory again, wherever it lies; False where it was there."""
        for storage, size in self._emptied:
            storage.resize_(size)
        emptied, self._emptied = self._emptied, []
        return bool(emptied)
