"""What a feature is made from."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import EngineConfig
from app.engine.pooling.info import PoolingInfo
from app.engine.worker.forward_pass import ForwardPass
from app.engine.worker.row_state import RowState


@dataclass(slots=True, frozen=True)
class FeatureContext:
    """One rank's parts, as they are before the KV cache is sized."""

    config: EngineConfig
    forward: ForwardPass
    state: RowState
    pooling: PoolingInfo | None = None  # None: the model generates
