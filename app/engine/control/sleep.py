"""Sleep: the memory of weights and KV cache is given back, for another process on the same device, and taken again."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

from app.engine.control.pause import Mode, hold
from app.engine.core import EngineCore
from app.records.engine_state import TAGS, Tag


def sleep(core: EngineCore, level: Literal[1, 2] = 1, mode: Mode = "abort") -> Generator[None]:
    """Level 1 keeps the weights in host memory, 2 drops them; the KV cache is dropped. Requests that are kept are
    computed anew after `wake_up`. One that sleeps already may go from 1 to 2."""
    state = core.state
    if not state.asleep:
        yield from hold(core, "sleep", mode)
        core.scheduler.preempt_all()
        core.forget_prefixes()
    core.hold("sleep")
    core.call_workers("sleep", level)
    state.asleep = frozenset(TAGS)
    state.sleep_level = max(state.sleep_level, level)


def wake_up(core: EngineCore, tags: list[Tag] | None = None) -> None:
    """Memory again for all, or for some of it first. Once all is awake the requests go on: after level 2 when the
    weights have come back too (`reload_weights`, `update_weights`)."""
    state = core.state
    wanted = [tag for tag in TAGS if tag in state.asleep and (tags is None or tag in tags)]
    if not wanted:
        return
    core.call_workers("wake_up", wanted)
    if "weights" in wanted and state.sleep_level == 2:
        state.weights_missing = True
    state.asleep -= set(wanted)
    go_on(core)


def go_on(core: EngineCore) -> None:
    """End the sleep if nothing sleeps or is missing any more."""
    state = core.state
    if state.asleep or not state.sleep_level:
        return
    if state.weights_missing:
        return
    core.defer(core.call_workers("recapture"))
    state.sleep_level = 0
    core.release("sleep")
