"""Waits for the workers: what was aborted before is computed no longer."""

from __future__ import annotations

from app.engine.core import EngineCore


def settle(core: EngineCore) -> None:
    """Return once no step is out; EngineDeadError when one of them ends the workers."""
    core.settle()
