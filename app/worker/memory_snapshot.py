"""Dumps what a rank's device memory holds, by torch's allocator (opened by pytorch.org/memory_viz)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from app.errors import InvalidRequestError
from app.platforms import platform_of


def dump_memory(directory: str, rank: int, device: torch.device) -> str:
    """Write the dump into `directory`; its path.

    UnsupportedError where the device's allocator cannot tell, InvalidRequestError where `directory` cannot be written.
    """
    path = Path(directory) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank-{rank}.memory.pickle"
    try:
        platform_of(device).dump_memory(path)
    except OSError as error:
        raise InvalidRequestError(f"directory: {error}", param="directory") from error
    return str(path)
