"""The host's own processor: a call computes before it returns, with the threads that it is given."""

from __future__ import annotations

import torch

from app.platforms.base import Platform


class Cpu(Platform):
    """Any number of ranks share it."""

    name = "cpu"
    label = "CPU"
    device_type = "cpu"
    dtype = "float32"

    def serves(self, device_type: str) -> bool:
        """Every build of torch has it."""
        return device_type == "cpu"

    def count(self) -> int:
        """It is always there."""
        return 1

    def device(self, local_rank: int) -> torch.device:
        """The same for all ranks."""
        return torch.device("cpu")
