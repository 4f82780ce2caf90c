"""Holds what a feature is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.config.engine import EngineConfig
from app.records.pooling_info import PoolingInfo
from app.worker.forward_pass import ForwardPass
from app.worker.rows.row_state import RowState


@dataclass(slots=True, frozen=True)
class FeatureContext:
    """One rank's parts, as they are before the KV cache is sized."""

    config: EngineConfig
    forward: ForwardPass
    state: RowState
    pooling: PoolingInfo | None = None  # None: the model generates
    # Names of tensors that layers of other pipeline stages are filled from.
    elsewhere: Callable[[], frozenset[str]] = frozenset
