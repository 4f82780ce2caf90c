"""Holds what running requests have and lack: what the KV-cache manager must know to say whether one more fits
beside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, frozen=True)
class RunningRows:
    """The requests that may be in the next step: one entry each."""

    num_tokens: NDArray[np.int32]
    num_slots: NDArray[np.int32]  # that their blocks have
    num_confirmed: NDArray[np.int32]  # tokens computed by steps that have returned
