"""The table of one operation's implementations, from which a platform takes its own."""

from __future__ import annotations

from typing import TypeVar

import torch

from app.platforms import platform_of
from app.registry import Registry

T = TypeVar("T")


class KernelTable(Registry[T]):
    """Keeps them by the names of platforms' kernels (`Platform.kernels`). A layer looks once, when it is built for a
    device, and keeps what it finds: steps look nothing up."""

    def on(self, device: torch.device) -> T:
        """The implementation for a device."""
        return self.load(platform_of(device).kernels)
