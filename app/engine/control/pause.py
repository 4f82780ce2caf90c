"""Holds an engine: its requests end, or end early, or stay as they are; new ones wait."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

from app.engine.control.prefix_cache import reset_prefix_cache
from app.engine.core import EngineCore
from app.errors import InvalidRequestError
from app.records.engine_state import HoldReason

ENDED = "an operator has ended all requests: ask again"
# What becomes of the requests that are here. `wait`: they end as they would; `abort`: they end now, with an
# error; `keep`: they stand still, and go on afterwards.
Mode = Literal["wait", "abort", "keep"]


def pause(core: EngineCore, mode: Mode = "abort", clear_cache: bool = False) -> Generator[None]:
    """Compute nothing until `resume`; requests that come meanwhile wait. `clear_cache`: forget prefixes as well."""
    yield from hold(core, "pause", mode)
    if clear_cache:
        core.scheduler.preempt_all()
        reset_prefix_cache(core)


def resume(core: EngineCore) -> None:
    """Go on with the requests that are here, unless the engine sleeps or lacks its weights."""
    core.release("pause")


def abort_requests(core: EngineCore) -> int:
    """End all requests that are here, with an error that says so; how many there were. Not as aborted ones: an ingress
    lets those go on at another replica."""
    return core.end_all(ENDED)


def hold(core: EngineCore, reason: HoldReason, mode: Mode) -> Generator[None]:
    """Hold new requests, and see to those that are here; taken back if the caller's time runs out meanwhile."""
    is_new = reason not in core.state.holds
    core.hold(reason)
    try:
        if mode == "abort":
            abort_requests(core)
        while mode == "wait" and not core.is_drained:
            if core.is_frozen:
                raise InvalidRequestError("mode=wait: the requests stand still; use abort or keep", param="mode")
            yield
    except BaseException:
        if is_new:
            core.release(reason)
        raise
    core.settle()
    core.freeze()
