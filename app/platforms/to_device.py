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
    """The array as a tensor on the device. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type in ON_HOST:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
