"""What a rank's device memory holds, as a dump of torch's allocator (opened by pytorch.org/memory_viz)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from app.errors import InvalidRequestError, UnsupportedError


def dump_memory(directory: str, rank: int, device_type: str) -> str:
    """Write the dump into `directory`; its path.

    UnsupportedError where the device is none of CUDA's, InvalidRequestError where `directory` cannot be written.
    """
    if device_type != "cuda":
        raise UnsupportedError(f"a memory snapshot is of CUDA's allocator; this engine runs on a {device_type}")
    path = Path(directory) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank-{rank}.memory.pickle"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise InvalidRequestError(f"directory: {error}", param="directory") from error
    return str(path)
