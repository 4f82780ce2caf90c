"""What a rank computes, as a trace of torch's profiler, from its making until `stop`."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Profile:
    """One recording, of the thread that makes it and of the device; that thread also stops it."""

    def __init__(self, directory: str, rank: int) -> None:
        """Raises OSError where `directory` cannot be made."""
        self._path = Path(directory) / f"{time.strftime('%Y%m%d-%H%M%S')}-rank-{rank}.trace.json.gz"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> str:
        """End it and write the trace; its path."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        return str(self._path)
