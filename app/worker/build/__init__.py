"""Puts a worker together, by what its model is run for: one file and one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from app.config.engine import EngineConfig
from app.registry import Registry

if TYPE_CHECKING:  # the table alone needs no torch
    from app.worker.build.parts import Parts
    from app.worker.placement import Placement

BUILDERS: Registry[Callable[[EngineConfig, Placement], Parts]] = Registry(
    "runner",
    {
        "generate": "app.worker.build.generate:build",
        "pooling": "app.worker.build.pooling:build",
    },
)


def build(config: EngineConfig, place: Placement) -> Parts:
    """The parts of this rank's worker. Raises ConfigError, CheckpointError and UnsupportedError."""
    return BUILDERS.load(place.info.runner(config.runner))(config, place)
