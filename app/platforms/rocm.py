"""AMD's GPUs: torch's ROCm build keeps the names of CUDA, so nearly all is as in cuda.py.

Not run on such a GPU yet. What is shown without one: every Triton kernel outside of files for Hopper compiles for an
MI300 (tests/kernels/test_compile_for_rocm.py).
"""

from __future__ import annotations

import torch

from app.platforms.cuda import Cuda


class Rocm(Cuda):
    """One GPU a rank."""

    name = "rocm"
    collectives_label = "RCCL"
    has_symmetric_memory = False  # not tried

    def serves(self, device_type: str) -> bool:
        """Only in ROCm's build of torch."""
        return device_type == "cuda" and torch.version.hip is not None

    def fp8_refusal(self, device: torch.device) -> str | None:
        """Up to MI300 (gfx942) fp8 numbers are another kind (e4m3fnuz); gfx950 computes in OCP's."""
        architecture = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
        return None if architecture == "gfx950" else f"{architecture} has no fp8 numbers of the kind e4m3fn"

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Torch's numbers are AMD's own here, and mean nothing of NVIDIA's."""
        return (0, 0)
