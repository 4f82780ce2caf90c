"""Profiles of what every worker computes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from app.engine.core import EngineCore
from app.errors import InvalidRequestError


def start_profile(core: EngineCore, directory: str) -> None:
    """Let every rank record from now on, to write into `directory` of its own node.

    InvalidRequestError where that is done already, or a rank cannot; then none does.
    """
    if core.is_profiling:
        raise InvalidRequestError("a profile is being recorded: stop it first")
    try:
        core.call_workers("start_profile", directory)
    except InvalidRequestError:
        with suppress(InvalidRequestError):
            core.call_workers("stop_profile")  # those that have begun
        raise
    core.is_profiling = True


def stop_profile(core: EngineCore) -> list[Any]:
    """End the recording; the path of each rank's trace."""
    traces = core.call_workers("stop_profile")
    core.is_profiling = False
    return traces
