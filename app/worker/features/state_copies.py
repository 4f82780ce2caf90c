"""Copies states between the rows of running requests and where they are kept for others, as step messages say."""

from __future__ import annotations

from itertools import accumulate, chain
from math import gcd

import numpy as np
import torch

from app.platforms.to_device import to_device
from app.records.step import SchedulerOutput, StateCopy
from app.worker.attention.kv_cache import KVCache
from app.worker.features.context import FeatureContext
from app.worker.rows.worker_feature import WorkerFeature

WIDTHS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class StateCopier(WorkerFeature):
    """Copies on the device, in the order of the step messages.

    In blocks, a row's states lie one behind the other, as many bytes in each block as it has in all places together.
    """

    def __init__(self, cache: KVCache, in_blocks: bool) -> None:
        """Made before the KV cache is sized, so that its buffer is counted."""
        self._cache = cache
        num_bytes = cache.spec.blocks_per_state * cache.spec.bytes_per_block if in_blocks else 0
        device = next(chain.from_iterable(cache.states)).device
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._rows: list[torch.Tensor] = []  # [rows, E] each, of one type with the places
        self._places: list[torch.Tensor] = []  # [B, E] each; none: copies lie in slots
        self._staging = torch.empty(0)  # one row's, [blocks, elements of a block]

    def connect(self, kv_caches: list[torch.Tensor]) -> None:
        """See WorkerFeature."""
        rows = list(chain.from_iterable(self._cache.states))
        sizes = [tensor[0].numel() * tensor.itemsize for tensor in (*rows, *kv_caches)]
        common = gcd(*sizes)
        dtype = next(dtype for dtype in WIDTHS if common % dtype.itemsize == 0)
        self._rows = [tensor.view(len(tensor), -1).view(dtype) for tensor in rows]
        self._places = [tensor.view(len(tensor), -1).view(dtype) for tensor in kv_caches]
        width = sum(place.shape[1] for place in self._places)
        if width:
            self._staging = self._buffer.view(dtype).view(-1, width)

    def before(self, step: SchedulerOutput) -> None:
        """Copies to rows first: who leaves a state in some place overwrites what others have read by then."""
        copies = step.state_copies
        if copies is None:
            return
        in_blocks = self._cache.num_slots is None
        for copy in copies.loads:
            (self._load if in_blocks else self._load_slot)(copy)
        for copy in copies.stores:
            (self._store if in_blocks else self._store_slot)(copy)

    def _load_slot(self, copy: StateCopy) -> None:
        for row, kept in self._pairs:
            row[copy.row].copy_(kept[copy.slot])

    def _store_slot(self, copy: StateCopy) -> None:
        for row, kept in self._pairs:
            kept[copy.slot].copy_(row[copy.row])

    @property
    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows, kept = (chain.from_iterable(layers) for layers in (self._cache.states, self._cache.kept))
        return list(zip(rows, kept, strict=bool(self._cache.kept)))

    def _load(self, copy: StateCopy) -> None:
        index = self._index(copy)
        for place, part in zip(self._places, self._columns, strict=True):
            self._staging[:, part] = place.index_select(0, index)
        flat, at = self._staging.view(-1), 0
        for tensor in self._rows:
            size = tensor.shape[1]
            tensor[copy.row].copy_(flat[at : at + size])
            at += size

    def _store(self, copy: StateCopy) -> None:
        flat, index = self._staging.view(-1), self._index(copy)
        parts = [tensor[copy.row] for tensor in self._rows]
        torch.cat(parts, out=flat[: sum(map(len, parts))])
        for place, part in zip(self._places, self._columns, strict=True):
            place.index_copy_(0, index, self._staging[:, part])

    def _index(self, copy: StateCopy) -> torch.Tensor:
        """This rank may need fewer blocks than another."""
        blocks = np.array(copy.blocks[: len(self._staging)], np.int64)
        return to_device(blocks, self._staging.device)

    @property
    def _columns(self) -> list[slice]:
        sizes = [place.shape[1] for place in self._places]
        return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def create(context: FeatureContext) -> WorkerFeature | None:
    """The feature, where a layer of this rank keeps states."""
    cache = context.forward.cache
    return StateCopier(cache, context.config.enable_prefix_caching) if cache.spec.states else None
