"""A device that says it is a GPU: what is chosen for one, without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from app import platforms
from app.kernels import kernel_table, launch
from app.platforms.cuda import Cuda


class StubGpu(Cuda):
    """One of NVIDIA's of a generation; 0: of another maker's. Its tensors lie on the host or nowhere."""

    runtime = None

    def __init__(self, generation: int, *, fp8_products: bool = True) -> None:
        self.generation, self.has_fp8_products = generation, fp8_products  # type: ignore[misc]

    def capability(self, device: torch.device) -> tuple[int, int]:
        return (self.generation, 0)


@contextmanager
def as_on(generation: int, *, fp8_products: bool = True) -> Iterator[None]:
    """Within the block every device is such a GPU."""
    stub = StubGpu(generation, fp8_products=fp8_products)
    _forget()
    try:
        with mock.patch.object(platforms, "_of_type", return_value=stub):
            yield
    finally:
        _forget()


def _forget() -> None:
    """What was found for devices."""
    for found in (kernel_table._kernels_on, launch.early_launch, launch.shared_memory, launch.multiprocessors):
        if hasattr(found, "cache_clear"):
            found.cache_clear()
