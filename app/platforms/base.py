"""Defines what differs between kinds of devices: the contract of a platform.

A platform is chosen once, when a worker is placed, and asked by what is built for its device; steps do not ask it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import torch

from app.errors import UnsupportedError


class Platform(ABC):
    """One kind of device. Stateless; what is said here holds for a device that computes on the calling thread."""

    name: ClassVar[str]  # in `PLATFORMS` and in the option `device`
    label: ClassVar[str]  # in notes and errors: "CPU", "GPU"
    device_type: ClassVar[str]  # torch's name for where its tensors lie
    kernels: ClassVar[str] = "torch"  # which implementation of each table of app/kernels: "torch" or "triton"
    attention_backend: ClassVar[str] = "torch"  # what `auto` means
    dtype: ClassVar[str | None] = None  # what `auto` means; None: the checkpoint's
    collectives: ClassVar[str] = "gloo"  # torch.distributed's backends for the tensors of a worker group
    collectives_label: ClassVar[str] = "gloo"  # those for tensors on the device
    # torch's module of streams, events and memory (torch.cuda, torch.xpu) of a device that computes in the background:
    # calls enqueue, and the host waits for events. None: a call has computed when it returns.
    runtime: ClassVar[Any] = None
    has_graphs: ClassVar[bool] = False  # whether steps can be captured (torch.cuda.CUDAGraph)
    has_symmetric_memory: ClassVar[bool] = False  # whether ranks of a host may map each other's memory
    has_fp8_products: ClassVar[bool] = False  # torch._scaled_mm, whose results are bf16 and whose sizes multiples of 16
    profiler_activity: ClassVar[str | None] = None  # of torch.profiler.ProfilerActivity, beside the CPU's

    @property
    def is_async(self) -> bool:
        """True if the device computes while the host goes on: then a step is held back, and host memory is pinned."""
        return self.runtime is not None

    @abstractmethod
    def serves(self, device_type: str) -> bool:
        """True if this build of torch means this platform by its `device_type`."""

    @abstractmethod
    def count(self) -> int:
        """Devices that the process sees; 0: `auto` passes on."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of a rank; ConfigError where there is none."""

    def describe(self, device: torch.device) -> str:
        """The device's name for notes and errors."""
        return self.label

    def enter_thread(self, device: torch.device, threads: int) -> None:
        """Settings that hold for the calling thread only; `threads`: what a computing host may use."""
        torch.set_num_threads(threads)

    def fp8_refusal(self, device: torch.device) -> str | None:
        """Why the device has no e4m3 numbers (OCP's, torch.float8_e4m3fn); None: it has."""
        return None

    def capability(self, device: torch.device) -> tuple[int, int]:
        """NVIDIA's compute capability, (9, 0) for Hopper; (0, 0) for all that is not theirs."""
        return (0, 0)

    def uuid(self, device: torch.device) -> str:
        """The device's name in all processes of the host."""
        return str(UUID(int=0))

    def are_linked(self, uuids: Collection[str]) -> bool:
        """True if these devices of the host reach each other's memory by links that are made for it, which
        `app/distributed/symmetric_all_reduce.py` was measured on."""
        return False

    def pin(self, memory: torch.Tensor) -> None:  # noqa: B027 (nothing to lock)
        """Lock host memory where it lies, so that the device copies it in the background. RuntimeError."""

    def unpin(self, memory: torch.Tensor) -> None:  # noqa: B027
        """Undo `pin`."""

    def process_group(self, store: Any, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> Any:
        """A process group beside torch's own, for tensors on the device."""
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(store, rank, world_size, timeout)

    def dump_memory(self, path: Path) -> None:
        """Write what the device's allocator holds, OSError; UnsupportedError where it cannot tell."""
        raise UnsupportedError(f"a memory snapshot is of a GPU's allocator; this engine runs on a {self.label}")
