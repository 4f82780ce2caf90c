"""What a launch must know of its device: how early it may be, and how much shared memory there is."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Keywords of a launch that need not wait for the end of the kernel before it (programmatic dependent launch).

    The device sets the kernel up while the one before it on the stream drains. EARLY, a constant of the kernel, has it
    begin with `tl.extra.cuda.gdc_wait()`, which waits for all that was written. In a decode step, whose kernels take a
    few microseconds each, that is half of one a launch. From Hopper on.
    """
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; on a CPU, in Triton's interpreter, a Hopper's."""
    if device.type != "cuda":
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
