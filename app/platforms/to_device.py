"""Host arrays to the device without waiting for it.

A plain copy from pageable memory waits until the device has done all it was given before, which would undo the
overlap of two steps in flight (I2); a copy from pinned memory does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ON_HOST = ("cpu", "meta")  # types of devices whose tensors lie in host memory, or nowhere: steps ask no platform


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device. On a CPU it shares the array's memory, if that may be written to."""
    if not array.flags.writeable:
        return _copied(array, device)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type in ON_HOST:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _copied(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of memory that nobody may write to, copied once: where it is sent from, or where it stays."""
    is_sent = device.type not in ON_HOST
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    copy = torch.empty(array.shape, dtype=dtype, device="cpu", pin_memory=is_sent)
    copy.numpy()[...] = array
    return copy.to(device, non_blocking=True) if is_sent else copy
