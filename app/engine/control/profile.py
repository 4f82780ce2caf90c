"""Profiles of what every worker computes, and of what its memory holds."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field

from app.engine.core import EngineCore
from app.errors import InvalidRequestError

MAX_STEPS = 1000
MAX_S = 120.0


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
    core.is_profiling, core.last_traces = True, []


def stop_profile(core: EngineCore) -> list[Any]:
    """End the recording; the path of each rank's trace. Those of the last one again, where it has ended by itself."""
    if not core.is_profiling and core.last_traces:
        traces, core.last_traces = core.last_traces, []
        return traces
    traces = core.call_workers("stop_profile")
    core.is_profiling = False
    return traces


def record_profile(
    core: EngineCore,
    directory: str,
    num_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)],
    max_s: Annotated[float, Field(gt=0, le=MAX_S)],
) -> Generator[None, None, list[Any]]:
    """Record the next `num_steps` steps, for `max_s` seconds at most, or until `stop_profile`; each rank's path."""
    start_profile(core, directory)
    first, deadline = core.stats().steps_total, time.monotonic() + max_s
    try:
        while core.is_profiling and core.stats().steps_total < first + num_steps and time.monotonic() < deadline:
            yield
    finally:
        if core.is_profiling:  # else somebody has stopped it, and has the paths
            core.settle()
            core.last_traces = stop_profile(core)
    return core.last_traces


def memory_snapshot(core: EngineCore, directory: str) -> list[Any]:
    """Let every rank write what its device's allocator holds into `directory` of its own node; their paths.

    UnsupportedError where ranks have no CUDA device.
    """
    return core.call_workers("memory_snapshot", directory)
