"""The loads of many replicas side by side, for policies that weigh all of them for every request.

The load book keeps one table and refreshes the columns of a replica when its load changes; a policy then computes with
columns: a few microseconds an operation, where a Python loop over 256 replicas takes a large part of a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from app.deployments.routing.policies.base import ReplicaLoad

FloatArray = NDArray[np.float64]
NUM_COLUMNS = 9


class LoadTable(Sequence[ReplicaLoad]):
    """Loads by position, and float64 [R] of each of their figures. Who changes a load calls `refresh`."""

    def __init__(self, loads: Sequence[ReplicaLoad]) -> None:
        self._loads = list(loads)
        self._columns = np.empty((NUM_COLUMNS, len(self._loads)))
        columns = iter(self._columns)
        self.num_requests: FloatArray = next(columns)
        self.outstanding_tokens: FloatArray = next(columns)
        self.queued_prefill_tokens: FloatArray = next(columns)
        self.fullness: FloatArray = next(columns)
        self.cache_share: FloatArray = next(columns)
        self.prefill_token_s: FloatArray = next(columns)
        self.decode_step_s: FloatArray = next(columns)
        self.block_size: FloatArray = next(columns)
        self.max_num_seqs: FloatArray = next(columns)
        self.position = {load.report.replica_id: i for i, load in enumerate(self._loads)}
        for i in range(len(self._loads)):
            self.refresh(i)

    @classmethod
    def of(cls, loads: Sequence[ReplicaLoad]) -> LoadTable:
        """`loads` itself where it is a table."""
        return loads if isinstance(loads, cls) else cls(loads)

    def refresh(self, position: int) -> None:
        """The load at `position` has changed."""
        load = self._loads[position]
        report = load.report
        self._columns[:, position] = (
            load.num_requests,
            load.outstanding_tokens,
            report.queued_prefill_tokens + load.routed_prefill_tokens,
            load.fullness,
            load.cache_share,
            report.prefill_token_s,
            report.decode_step_s,
            report.block_size,
            report.max_num_seqs,
        )

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[ReplicaLoad]:
        return iter(self._loads)

    @overload
    def __getitem__(self, index: int) -> ReplicaLoad: ...

    @overload
    def __getitem__(self, index: slice) -> list[ReplicaLoad]: ...

    def __getitem__(self, index: int | slice) -> ReplicaLoad | list[ReplicaLoad]:
        return self._loads[index]
