"""SIGTERM to a replica's process: what an operator's `kill` sends, and a machine that is being switched off.

Ray's handler ends the process at once. Python lets another one be set by the main thread only, in which Ray runs
nothing of ours; faulthandler's can be set by any thread: it writes where the main thread is into a pipe, and the event
loop, which reads there, knows that the signal came.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable


class Termination:
    """Calls `on_sigterm` on the running event loop when the signal comes, in Ray's handler's stead, until `close`."""

    def __init__(self, on_sigterm: Callable[[], None]) -> None:
        self._on_sigterm = on_sigterm
        self._loop = asyncio.get_running_loop()
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)  # a full pipe must not hold up the main thread
        self._loop.add_reader(self._reader, self._read)
        faulthandler.register(signal.SIGTERM, file=self._writer, all_threads=False, chain=False)

    def close(self) -> None:
        """Leave the signal to Ray's handler again; idempotent."""
        if self._reader < 0:
            return
        faulthandler.unregister(signal.SIGTERM)
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._loop.remove_reader(self._reader)
        os.close(self._reader)
        os.close(self._writer)
        self._reader = self._writer = -1

    def _read(self) -> None:
        os.read(self._reader, 1 << 16)
        self._on_sigterm()
