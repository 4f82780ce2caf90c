"""Finds adapters for requests whose `model` is no known name, and has all replicas serve them.

Looked for is each name once; that there is none is remembered for a while, for so many names at most, and while there
is no room to remember another one, nothing is looked for. So clients can have no more work done than that, whatever
they write, and a name that nobody knows costs a look into a dictionary.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from app.backends import ADAPTER_RESOLVERS
from app.checkpoints.adapters.adapter_resolver import AdapterResolver
from app.config.model import ModelConfig
from app.errors import EngineDeadError, MantaError, ModelNotFoundError, OverloadedError, ServerOverloadedError
from app.telemetry.metrics_recorder import MetricsRecorder

ABSENT_S = 30.0  # that a name is not looked for again
BUSY_S = 1.0  # the same where the adapter is as it should be, and replicas could not take it now
LOADED_S = 60.0  # that a request waits for its adapter
MOST_ABSENT = 4096
MOST_RUNNING = 16  # names that are looked for or loaded at a time
MOST_CHARS = 256  # of an adapter's name
HEARD_S = 10.0  # for replicas to tell of an adapter that they have loaded

# Has all replicas of a model serve, under a name, the adapter in a directory; the error, or None.
Load = Callable[[str, str, str], Awaitable[MantaError | None]]

logger = logging.getLogger("manta.ingress")


class AdapterFinder:
    """Belongs to one ingress replica. `resolvers`: by model, in the order in which they are asked; `names`: those that
    requests may call."""

    def __init__(
        self, resolvers: Mapping[str, AdapterResolver], names: Container[str], load: Load, recorder: MetricsRecorder
    ) -> None:
        self._resolvers = resolvers
        self._names = names
        self._load = load
        self._recorder = recorder
        self._running: dict[str, asyncio.Task[None]] = {}
        # Until when, and what it failed with, if it was there; the oldest first.
        self._absent: dict[str, tuple[float, MantaError | None]] = {}
        self._thread = ThreadPoolExecutor(1, "adapter-names")  # a file system that hangs holds nothing else

    async def learn(self, name: str) -> None:
        """Return once the name is known, or has been looked for. ModelNotFoundError where an adapter was found that
        cannot be loaded, ServerOverloadedError where replicas cannot take it now or too many names are looked for."""
        if name in self._names or not 0 < len(name) <= MOST_CHARS:
            return
        task = self._running.get(name)
        if task is None and not self._is_absent(name):
            if len(self._running) >= MOST_RUNNING:
                raise ServerOverloadedError("many adapters are being looked for; try later", param="model")
            task = self._running[name] = asyncio.create_task(self._find(name))
        if task is not None:
            await self._loaded(task, name)
        if (error := self._absent.get(name, (0.0, None))[1]) is not None:
            raise type(error)(error.message, param=error.param)

    async def _loaded(self, task: asyncio.Task[None], name: str) -> None:
        try:
            async with asyncio.timeout(LOADED_S):
                await asyncio.shield(task)  # others may wait for it
        except TimeoutError:
            raise ServerOverloadedError(f"the adapter {name!r} is being loaded yet; try later", param="model") from None

    def _is_absent(self, name: str) -> bool:
        """True if it is not to be looked for: it was not there just now, or there is no room to remember that."""
        now = time.monotonic()
        while self._absent and next(iter(self._absent.values()))[0] <= now:
            del self._absent[next(iter(self._absent))]
        if name in self._absent and self._absent[name][0] <= now:
            del self._absent[name]
        return name in self._absent or len(self._absent) + len(self._running) >= MOST_ABSENT

    async def _find(self, name: str) -> None:
        outcome, until_s = "failed", ABSENT_S
        failure: MantaError | None = None
        try:
            outcome = "loaded" if await self._found(name) else "absent"
        except (EngineDeadError, OverloadedError) as error:  # over soon, and a client that tries again is served
            logger.warning("the adapter %r cannot be loaded now: %s", name, error.message)
            until_s = BUSY_S
            failure = ServerOverloadedError(f"the adapter {name!r} cannot be loaded now; try later", param="model")
        except Exception as error:  # a plugin's, too
            known = error.message if isinstance(error, MantaError) else None
            logger.warning("the adapter %r cannot be loaded: %s", name, known or repr(error), exc_info=known is None)
            failure = ModelNotFoundError(f"the adapter {name!r} cannot be loaded: see the server's log", param="model")
        finally:
            del self._running[name]
            self._recorder.increment("manta:ingress_adapter_lookups_total", 1.0, outcome)
            if outcome != "loaded":
                self._absent[name] = time.monotonic() + until_s, failure

    async def _found(self, name: str) -> bool:
        """True once all replicas of a model serve it; False: no model has an adapter of this name."""
        loop = asyncio.get_running_loop()
        for model, resolver in self._resolvers.items():
            directory = await loop.run_in_executor(self._thread, resolver.find, name)
            if directory is None:
                continue
            if (error := await self._load(model, name, str(directory))) is not None:
                raise error
            await self._heard(name)
            return True
        return False

    async def _heard(self, name: str) -> None:
        """Wait until replicas have told of it."""
        until = time.monotonic() + HEARD_S
        while name not in self._names:
            if time.monotonic() > until:
                raise EngineDeadError(f"no replica has told within {HEARD_S:g} s that it serves {name!r}")
            await asyncio.sleep(0.02)


def create_resolvers(models: Iterable[ModelConfig]) -> dict[str, AdapterResolver]:
    """Makes those of the models that have one. ConfigError names a plugin that is broken."""
    return {
        model.name: ADAPTER_RESOLVERS.load(model.adapter_resolver).of(model)
        for model in models
        if model.adapter_resolver is not None and model.adapter_directory is not None
    }
