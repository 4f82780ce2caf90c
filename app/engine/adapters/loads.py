"""Brings adapters into the workers' host memory beside the steps, also those that lie on disk until a request asks.

Where there is no room, the one that was asked for longest ago, and that no request has, is read from its directory
another time. Requests whose adapter is on its way wait in the queue, and are passed by others; where all that are in
memory have requests, one is brought once so many others have been asked for that it would wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.errors import EngineDeadError, InvalidRequestError, MantaError
from app.records.adapter import AdapterAsk, KnownAdapter

if TYPE_CHECKING:  # what owns it
    from app.engine.core import EngineCore

POLL_S = 0.01  # between two looks at the workers, for which the steps in flight have to come back
PATIENCE = 4  # requests for each adapter in host memory, before one that has requests makes room for another

Waiting = Generator[None, None, None]


class AdapterLoads:
    """Loads for one engine. `advance` is called between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._call: Waiting | None = None
        self._digest = b""  # what it brings

    @property
    def is_busy(self) -> bool:
        """True if a waiting request needs an adapter that is not there."""
        return self._call is not None or bool(self._missing)

    def advance(self) -> None:
        """Go on with the load under way, or begin the one that was wanted first."""
        if self._call is None:
            wanted = next((digest for digest in self._missing if digest not in self._core.adapters.loaded), None)
            known = None if wanted is None else self._core.adapters.of(wanted)
            if known is None:  # it has lost its name: what waits for it ends below
                if wanted is not None:
                    self._fail(wanted, "is not loaded any more")
                return
            self._digest, self._call = bytes.fromhex(known.digest), self._bring(known)
        try:
            next(self._call)
        except StopIteration:
            self._call = None
        except EngineDeadError:
            raise
        except MantaError as error:
            self._call = None
            self._fail(self._digest, f"cannot be read again: {error.message}")

    def _bring(self, known: KnownAdapter) -> Waiting:
        core = self._core
        AdapterFiles.read(known.path, core.config.max_lora_rank)
        core.call_workers("call_feature", "check_adapter", known.path)
        yield from take_in(core, known.path, self._digest)
        core.adapters.load(self._digest)

    def _fail(self, digest: bytes, why: str) -> None:
        name = ""
        for request in list(self._core.scheduler.requests.values()):
            ask = request.spec.asked(AdapterAsk)
            if ask is not None and ask.digest == digest and request.row < 0:
                name = ask.name
                self._core.end_with_error(request, f"the adapter {name!r} {why}")
        self._missing.pop(digest, None)

    @property
    def _missing(self) -> dict[bytes, None]:
        """Those that waiting requests need and workers lack, as of the last plan."""
        slots = self._core.scheduler.adapters
        return {} if slots is None else slots.missing


def take_in(core: EngineCore, path: str, digest: bytes) -> Waiting:
    """Have every worker read an adapter that was checked; others make room, where they may lie on disk meanwhile."""
    began = core.adapters.num_uses
    while core.config.max_disk_loras and len(core.adapters.loaded) >= core.config.max_cpu_loras:
        if not _make_room(core, began):
            yield from wait(core)
    began_s = time.monotonic()
    try:
        yield from _begin(core, path, digest, began)
        while not all(core.call_workers("call_feature", "adapter_is_read", digest)):
            yield from wait(core)
        core.call_workers("call_feature", "fit_adapter", digest)
        core.adapters.note_read(time.monotonic() - began_s)
    except BaseException:
        core.call_workers("call_feature", "drop_adapter", digest)
        raise


def _begin(core: EngineCore, path: str, digest: bytes, began: int) -> Waiting:
    """Workers refuse what takes more memory than they may have (lora_host_memory_bytes)."""
    while True:
        try:
            core.call_workers("call_feature", "read_adapter", path, digest)
            return
        except InvalidRequestError:
            core.call_workers("call_feature", "drop_adapter", digest)
            if not (core.config.max_disk_loras and core.adapters.loaded):
                raise
        if not _make_room(core, began):
            yield from wait(core)


def _make_room(core: EngineCore, began: int) -> bool:
    """Have one adapter lie on disk alone; False: requests have all of them. `began`: requests for adapters before this
    load."""
    asks = [(request.row, request.spec.asked(AdapterAsk)) for request in core.scheduler.requests.values()]
    is_due = core.adapters.num_uses - began > PATIENCE * core.config.max_cpu_loras
    used = {ask.digest for row, ask in asks if ask is not None and (row >= 0 or not is_due)}
    digest = core.adapters.longest_unused(used)
    if digest is None:
        return False
    core.adapters.drop(digest)
    core.call_workers("call_feature", "drop_adapter", digest)
    return True


def wait(core: EngineCore) -> Waiting:
    """The engine goes on for a while."""
    until = time.monotonic() + POLL_S
    while time.monotonic() < until:
        if not core.is_computing:
            time.sleep(0.001)
        yield
