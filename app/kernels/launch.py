"""Answers what launches need: how early one may be, how much shared memory there is, and the sums of grids and tiles.

`triton.cdiv` and `triton.next_power_of_2` give the same numbers, through wrappers for the compiler that take as long as
a small operator of torch; a layer asks a dozen times.
"""

from __future__ import annotations

from functools import cache

import torch

from app.kernels.kernel_table import FROM_HOPPER
from app.platforms import platform_of

_INTERPRETED_SMS = 2

# Keywords of a launch that rounds each product and each sum. Else the compiler leaves one of a sum's two products
# unrounded, and which one depends on the kernel's constants, such as how many heads this rank holds: even on where a
# head lies in a tile.
ROUNDS_PRODUCTS = {"enable_fp_fusion": False}


@cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Keywords of a launch that need not wait for the end of the kernel before it (programmatic dependent launch).

    The device sets the kernel up while the one before it on the stream drains. EARLY, a constant of the kernel, has it
    begin with `tl.extra.cuda.gdc_wait()`, which waits for all that was written. In a decode step, whose kernels take a
    few microseconds each, that is half of one a launch. From Hopper on. Before it a kernel may read what no kernel on
    the stream writes: weights (`gemm/triton_held.py`), slots of an encoder's output (`attention/triton_encoded.py`); or
    what the kernel before does not write, such as a layer's states (`recurrent/early_steps.py`).

    No kernel lets the next one begin (`griddepcontrol.launch_dependents`) before it has waited itself. So only the
    kernel before may still run, and what others before it wrote may be read before the wait.
    """
    if FROM_HOPPER.are_met(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def register_limit(most: int | None) -> dict[str, int]:
    """Keywords of a launch whose threads get so many registers at most. AMD's compiler knows no such limit."""
    return {} if most is None or torch.version.hip is not None else {"maxnreg": most}


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use; in Triton's interpreter, on a CPU, a Hopper's."""
    runtime = platform_of(device).runtime
    if runtime is None:
        return 227 << 10
    properties = runtime.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@cache
def multiprocessors(device: torch.device) -> int:
    """The GPU's multiprocessors; the interpreter pretends to have two, so that programs share a list there too."""
    runtime = platform_of(device).runtime
    return _INTERPRETED_SMS if runtime is None else int(runtime.get_device_properties(device).multi_processor_count)


def cdiv(dividend: int, divisor: int) -> int:
    """dividend / divisor, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
