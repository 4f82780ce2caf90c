"""Asks the driver's library (NVML) whether GPUs are connected by NVLink.

torch can say whether a GPU reaches another one's memory, not by what: over PCIe, too. NCCL needs the same library, so
it is there wherever several ranks run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from itertools import permutations
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_BY_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_OK = 0  # of calls (NVML_SUCCESS), and of a pair of GPUs (NVML_P2P_STATUS_OK)


def have_nvlink(uuids: Collection[str]) -> bool:
    """True if each of these GPUs, of this host, has NVLink to each other one, by switches too. False where there is
    nobody to tell."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    if library.nvmlInit_v2() != _OK:
        return False
    try:
        devices = [_device(library, uuid) for uuid in uuids]
        return None not in devices and all(_is_linked(library, one, other) for one, other in permutations(devices, 2))
    finally:
        library.nvmlShutdown()


def _device(library: Any, uuid: str) -> ctypes.c_void_p | None:
    device = ctypes.c_void_p()
    return device if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) == _OK else None


def _is_linked(library: Any, one: ctypes.c_void_p | None, other: ctypes.c_void_p | None) -> bool:
    status = ctypes.c_int(-1)
    answer = library.nvmlDeviceGetP2PStatus(one, other, _BY_NVLINK, ctypes.byref(status))
    return bool(answer == _OK and status.value == _OK)
