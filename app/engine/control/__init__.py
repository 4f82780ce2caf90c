"""Control calls: what an operator asks of an engine between two steps, by the names of one table.

A call is a function of the core and of its own arguments. It runs on the thread that drives the core, while no step is
out; `core.call_workers` asks all ranks. One that has to wait, for the end of the requests that run for instance, is a
generator: at each `yield` the engine goes on, and it is asked again after a step. Nothing here is looked at in a step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from app.engine.core import EngineCore
from app.errors import InvalidRequestError
from app.registry import Registry

CONTROLS: Registry[Callable[..., Any]] = Registry(
    "control call",
    {
        "describe": "app.engine.control.describe:describe",
        "pause": "app.engine.control.pause:pause",
        "resume": "app.engine.control.pause:resume",
        "abort_requests": "app.engine.control.pause:abort_requests",
        "reset_prefix_cache": "app.engine.control.prefix_cache:reset_prefix_cache",
        "sleep": "app.engine.control.sleep:sleep",
        "wake_up": "app.engine.control.sleep:wake_up",
        "load_adapter": "app.engine.control.adapters:load_adapter",
        "unload_adapter": "app.engine.control.adapters:unload_adapter",
        "check_weights": "app.engine.control.weights:check_weights",
        "reload_weights": "app.engine.control.weights:reload_weights",
        "update_weights": "app.engine.control.weights:update_weights",
        "start_weight_update": "app.engine.control.weights:start_weight_update",
        "load_weights": "app.engine.control.weights:load_weights",
        "init_weight_transfer_engine": "app.engine.control.transfer:init_weight_transfer_engine",
        "receive_weights": "app.engine.control.transfer:receive_weights",
        "finish_weight_update": "app.engine.control.weights:finish_weight_update",
        "start_profile": "app.engine.control.profile:start_profile",
        "stop_profile": "app.engine.control.profile:stop_profile",
        "record_profile": "app.engine.control.profile:record_profile",
        "memory_snapshot": "app.engine.control.profile:memory_snapshot",
        "settle": "app.engine.control.settle:settle",
    },
)


# Those that an operator may make by name: their arguments and results are JSON, and no path is written to.
REMOTE = (
    "abort_requests", "check_weights", "describe", "pause", "reload_weights", "reset_prefix_cache", "resume", "sleep",
    "update_weights", "wake_up",
)  # fmt: skip


def begin(core: EngineCore, name: str, arguments: Mapping[str, Any]) -> Generator[None, None, Any]:
    """The call, not begun: `next` runs it up to a place where it waits, StopIteration brings its result.

    UnsupportedError for an unknown name, InvalidRequestError that names the argument at fault, and what the call and
    the workers raise: of the latter the first rank's error, which names the rank.
    """
    function = _checked(name)
    core.settle()
    try:
        result = function(core, **arguments)
    except ValidationError as error:
        first = error.errors()[0]
        argument = str(first["loc"][0]) if first["loc"] else name
        raise InvalidRequestError(f"{argument}: {first['msg']}", param=argument) from error
    if inspect.isgenerator(result):
        result = yield from result
    return result


def run(core: EngineCore, name: str, arguments: Mapping[str, Any]) -> Any:
    """The result of a call on an engine that nobody else drives, stepped while the call waits; see `begin`."""
    call = begin(core, name, arguments)
    while True:
        try:
            next(call)
        except StopIteration as done:
            return done.value
        core.step()


@functools.cache
def _checked(name: str) -> Callable[..., Any]:
    return validate_call(config=ConfigDict(arbitrary_types_allowed=True, strict=True))(CONTROLS.load(name))
