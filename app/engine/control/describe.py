"""Describes what an engine is at the moment."""

from __future__ import annotations

from typing import Any

from app.engine.core import EngineCore


def describe(core: EngineCore) -> dict[str, Any]:
    """Its state, its workers and its configuration as it holds now."""
    state, stats = core.state, core.stats()
    return {
        "is_paused": state.is_paused,
        "sleep_level": state.sleep_level,
        "asleep": sorted(state.asleep),
        "weights_missing": state.weights_missing,
        "model_revision": stats.model_revision,
        "world_size": core.config.world_size,
        "num_requests": len(core.scheduler.requests),
        "adapters": [adapter._asdict() for adapter in core.adapters.known],
        "config": core.config.model_dump(mode="json"),
    }
