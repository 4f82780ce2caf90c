"""Copies states between the rows of running requests and the slots in which they are kept for others, as step messages
say."""

from __future__ import annotations

from itertools import chain

import numpy as np

from app.platforms.to_device import to_device
from app.records.step import SchedulerOutput
from app.worker.attention.kv_cache import KVCache
from app.worker.features.context import FeatureContext
from app.worker.rows.worker_feature import WorkerFeature


class StateCopier(WorkerFeature):
    """Copies on the device, in the order of the step messages."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def before(self, step: SchedulerOutput) -> None:
        """From slots to rows first: who leaves a state in a slot overwrites what others have read by then."""
        copies = step.state_copies
        if copies is None:
            return
        rows, kept = (list(chain.from_iterable(layers)) for layers in (self._cache.states, self._cache.kept))
        for pairs, sources, targets in ((copies.loads, kept, rows), (copies.stores, rows, kept)):
            if not pairs or not sources:
                continue
            numbers = to_device(np.array(pairs, dtype=np.int64).T, sources[0].device)
            for source, target in zip(sources, targets, strict=True):
                target.index_copy_(0, numbers[1], source.index_select(0, numbers[0]))


def create(context: FeatureContext) -> WorkerFeature | None:
    """The feature, where a layer of this rank keeps states."""
    cache = context.forward.cache
    return StateCopier(cache) if cache.spec.states else None
