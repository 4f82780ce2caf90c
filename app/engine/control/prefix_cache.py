"""The prefix cache, forgotten on request."""

from __future__ import annotations

from app.engine.core import EngineCore


def reset_prefix_cache(core: EngineCore) -> bool:
    """No block computed so far is found again, on the device or in the host tier; requests that run keep theirs. The
    Routers learn it from the events."""
    core.forget_prefixes()
    return True
