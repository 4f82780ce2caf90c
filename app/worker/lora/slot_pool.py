"""The memory of a rank's slots: the matrices of all layers of each adapter that steps may compute with.

A slot is rows of TILE_RANK ranks of all layers, one behind the other: an adapter of few ranks is the first of them, and
goes from host memory into its slot in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from app.kernels.lora import LORA_OPS, TILE_RANK, LoraOps, SlotMatrices, SlotRows
from app.layers.linear import Linear
from app.loading.adapters import LayerPair
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

    @classmethod
    def of(cls, layer: Linear, begin: int) -> LayerPlace:
        """Behind what ends at `begin`."""
        sizes = tuple(share.size for share in layer.output_shares.values())
        inputs = layer.input_share.size
        second = begin + len(sizes) * TILE_RANK * inputs
        end = second + sum(sizes) * TILE_RANK
        return cls(tuple(layer.output_shares), sizes, inputs, begin, second, end)

    def firsts(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., P, TILE_RANK, K]: the same memory."""
        return rows[..., self.first : self.second].view(*rows.shape[:-1], len(self.parts), TILE_RANK, self.inputs)

    def seconds(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., N, TILE_RANK]: the same memory."""
        return rows[..., self.second : self.end].view(*rows.shape[:-1], sum(self.part_sizes), TILE_RANK)


class SlotPool:
    """Slots for adapters of up to `max_rank` on these layers."""

    def __init__(
        self, layers: Iterable[Linear], num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._places: dict[Linear, LayerPlace] = {}
        end = 0
        for layer in layers:
            self._places[layer] = LayerPlace.of(layer, end)
            end = self._places[layer].end
        self._width, self._device = end, device
        tiles = -(-max_rank // TILE_RANK)
        self._slots = torch.zeros(num_slots, tiles, end, dtype=dtype, device=device)
        self._num_tiles = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

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
        return self._slots.nbytes

    @property
    def layers(self) -> Sequence[Linear]:
        """The layers that have a place."""
        return list(self._places)

    def matrices(self, layer: Linear) -> SlotMatrices:
        """A layer's, of all slots."""
        place = self._places[layer]
        tiles = LORA_OPS.on(self._device).part_tiles(place.part_sizes, self._device)
        first, second = place.firsts(self._slots), place.seconds(self._slots)
        return SlotMatrices(first, second, self._num_tiles, place.part_sizes, tiles)

    def host_bytes(self, rank: int) -> int:
        """Memory of the host that an adapter of this rank takes."""
        return -(-rank // TILE_RANK) * self._width * self._slots.dtype.itemsize

    def on_host(self, pairs: Sequence[LayerPair]) -> torch.Tensor:
        """An adapter as it will lie in its slot [tiles, width], in host memory that the device copies by itself.
        CheckpointError names a tensor whose numbers are none."""
        tiles = max(-(-len(pair.first) // TILE_RANK) for pair in pairs) if pairs else 1
        pinned = platform_of(self._device).is_async
        rows = torch.zeros(tiles, self._width, dtype=self._slots.dtype, pin_memory=pinned)
        for pair in pairs:
            place, rank = self._places[pair.layer], len(pair.first)
            part = place.parts.index(pair.part)
            start = sum(place.part_sizes[:part])
            for tile in range(-(-rank // TILE_RANK)):
                ranks = slice(tile * TILE_RANK, min((tile + 1) * TILE_RANK, rank))
                count = ranks.stop - ranks.start
                pair.first_into(place.firsts(rows[tile])[part, :count], ranks)
                pair.second_into(place.seconds(rows[tile])[start : start + len(pair.second), :count], ranks)
        return rows

    def fill(self, slot: int, rows: torch.Tensor) -> None:
        """Put an adapter into a slot, behind all steps that were enqueued: none of them meets another's matrices."""
        self._slots[slot, : len(rows)].copy_(rows, non_blocking=True)
        self._num_tiles[slot : slot + 1].fill_(len(rows))

    def free(self) -> None:
        """Give the memory back; the slots' contents are gone."""
        if not self._emptied and platform_of(self._device).is_async:
            self._emptied = empty([self._slots.untyped_storage()])

    def restore(self) -> bool:
        """Memory again, wherever it lies; False where it was there."""
        for storage, size in self._emptied:
            storage.resize_(size)
        emptied, self._emptied = self._emptied, []
        return bool(emptied)
