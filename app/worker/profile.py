"""Records what a rank computes, as a trace of torch's profiler, from its making until `stop`.

torch records one profile a process, of the thread that began it, and crashes if another thread or a second recording
ends it: so both are refused here.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from app.errors import InvalidRequestError
from app.platforms import platform_of

_one_a_process = threading.Lock()


class Profile:
    """One recording, of this thread and of the device."""

    def __init__(self, directory: str, rank: int, device: torch.device) -> None:
        """Raises InvalidRequestError where this process records already, or `directory` cannot be made."""
        self._path = Path(directory) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank-{rank}.trace.json.gz"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError(f"directory: {error}", param="directory") from error
        if not _one_a_process.acquire(blocking=False):
            raise InvalidRequestError("a profile is being recorded in this process: stop it first")
        also = platform_of(device).profiler_activity
        activities = [ProfilerActivity.CPU, *([getattr(ProfilerActivity, also)] if also else [])]
        self._thread = threading.get_ident()
        self._is_running = True
        try:
            self._profile = profile(activities=activities)
            self._profile.start()
        except BaseException:
            _one_a_process.release()
            raise

    def stop(self) -> str:
        """End it and write the trace, which may be tried again; its path.

        InvalidRequestError on another thread than began it.
        """
        if threading.get_ident() != self._thread:
            raise InvalidRequestError("a profile is stopped by the thread that started it")
        if self._is_running:
            self._profile.stop()
            _one_a_process.release()
            self._is_running = False
        self._profile.export_chrome_trace(str(self._path))
        return str(self._path)
