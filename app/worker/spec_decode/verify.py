"""Says where rows have the logits by which their drafts are verified, in an ordinary step."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from app.kernels.drafts import LogitsPlaces
from app.platforms.to_device import to_device


def places_of(num_drafts: NDArray[np.int64], device: torch.device) -> LogitsPlaces:
    """One row's logits behind the other's."""
    each = num_drafts + 1
    firsts, counts = to_device(np.stack((np.cumsum(each) - each, each)).astype(np.int32), device).unbind()
    return LogitsPlaces(firsts, counts)
