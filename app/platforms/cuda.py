"""NVIDIA's GPUs."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch

from app.errors import ConfigError
from app.platforms.base import Platform
from app.platforms.nvlink import have_nvlink

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)


class Cuda(Platform):
    """One GPU a rank."""

    name = "cuda"
    label = "GPU"
    device_type = "cuda"
    kernels = "triton"
    attention_backend = "triton"
    collectives, collectives_label = "cpu:gloo,cuda:nccl", "NCCL"
    runtime: ClassVar[Any] = torch.cuda
    has_graphs = True
    has_symmetric_memory = True
    has_fp8_products = True
    profiler_activity = "CUDA"

    def serves(self, device_type: str) -> bool:
        """ROCm's build of torch says cuda too, and means rocm.py."""
        return device_type == "cuda" and torch.version.hip is None

    def count(self) -> int:
        """GPUs that torch can use."""
        usable = self.serves("cuda") and torch.cuda.is_available()
        return torch.cuda.device_count() if usable else 0

    def device(self, local_rank: int) -> torch.device:
        """The rank's own GPU."""
        if local_rank >= self.count():
            message = f"device={self.name}: rank {local_rank} needs a {self.label}, {self.count()} visible"
            raise ConfigError(message, param="device")
        return torch.device("cuda", local_rank)

    def describe(self, device: torch.device) -> str:
        """Its name on the market."""
        return str(torch.cuda.get_device_name(device))

    def enter_thread(self, device: torch.device, threads: int) -> None:
        """The current device is a thread's."""
        torch.cuda.set_device(device)

    def fp8_refusal(self, device: torch.device) -> str | None:
        """Tensor cores take e4m3 from Ada on."""
        if self.capability(device) >= FP8_CAPABILITY:
            return None
        return f"{self.describe(device)} has no fp8 tensor cores"

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Returns what torch says of it."""
        return torch.cuda.get_device_capability(device)

    def uuid(self, device: torch.device) -> str:
        """Without the prefix that NVIDIA's tools write."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def are_linked(self, uuids: Collection[str]) -> bool:
        """Asks for NVLink."""
        return have_nvlink([f"GPU-{uuid}" for uuid in uuids])

    def pin(self, memory: torch.Tensor) -> None:
        """Not torch's own pinned allocator, which rounds up to a power of two: tens of gigabytes for nothing."""
        register = torch.cuda.cudart().cudaHostRegister  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(register(memory.data_ptr(), memory.nbytes, 0)))

    def unpin(self, memory: torch.Tensor) -> None:
        """Unlock; no copy may be under way."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

    def process_group(self, store: Any, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> Any:
        """NCCL's (on ROCm, RCCL under the same name)."""
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, world_size, options)

    def dump_memory(self, path: Path) -> None:
        """A pickle that pytorch.org/memory_viz opens."""
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
