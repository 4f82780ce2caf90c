"""`compile_ahead` with Triton's real compiler and a driver that only notes what it is told. Run by
test_compile_ahead.py in a process of its own, as Triton must not interpret there.

Compiles for a GPU of compute capability 9.0. Exits 1 with a traceback if something is not as it should be.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompilationError

from app.kernels.compile_ahead import compile_ahead

CPU = torch.device("cpu")
launched: list[tuple[int, ...]] = []
loaded: list[tuple[str, str]] = []  # (kernel, thread)


class Utils:
    """What Triton asks a driver's library."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 16}

    def load_binary(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        loaded.append((name, threading.current_thread().name))
        return 1, 1, 0, 0, 1024


class Driver:
    """A GPU that runs nothing."""

    utils = Utils()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: launched.append(arguments[:3])


_TWO = tl.constexpr(2)


@triton.jit
def doubled(x):  # type: ignore[no-untyped-def]
    return x * _TWO


@triton.jit
def call_kernel(p_x, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.arange(0, BN)
    tl.store(p_x + o, doubled(tl.load(p_x + o)))


@triton.jit
def double_kernel(p_x, n, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(p_x + o, tl.load(p_x + o, mask=o < n) * 2, mask=o < n)


@triton.jit
def broken_kernel(p_x, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(p_x + tl.arange(0, BN), tl.zeros([BN + 1], tl.float32))


def raise_after_launch(x: torch.Tensor) -> None:
    """A block that ends early."""
    with compile_ahead(CPU):
        double_kernel[(1,)](x, 1, BN=64)
        raise KeyError


def main() -> None:
    """All in one, as kernels of one process know of each other."""
    triton.runtime.driver.set_active(Driver())
    made: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: made.append(fn.name)
    x = torch.zeros(64)

    def launch_all() -> None:
        for size in (16, 32, 64, 16):
            double_kernel[(size,)](x, 33, BN=size)

    with compile_ahead(CPU) as ahead:
        launch_all()
        broken_kernel[(1,)](x, BN=32)
        for size in (128, 16):  # no business of the block's: a kernel of its own, and one that the block waits for
            other = threading.Thread(target=lambda size=size: double_kernel[(5,)](x, 33, BN=size))
            other.start()
            other.join()
    assert (ahead.compiled, ahead.failed) == (3, 1), ahead
    assert launched == [(5, 1, 1), (5, 1, 1)], launched
    # Both threads may have made the one of 16.
    assert sum(thread.startswith("compile") for _, thread in loaded) in (2, 3), loaded
    before = len(made), len(loaded)
    assert {4, 5}.issuperset(before), (made, loaded)

    launch_all()  # nothing is compiled or loaded any more, and all are launched
    assert (len(made), len(loaded)) == before, (made, loaded)
    assert launched[2:] == [(16, 1, 1), (32, 1, 1), (64, 1, 1), (16, 1, 1)], launched

    for _ in range(2):  # fails as it always did
        with pytest.raises(CompilationError):
            broken_kernel[(1,)](x, BN=32)

    with pytest.raises(KeyError):
        raise_after_launch(x)  # what the block raises is raised
    double_kernel[(1,)](x, 1, BN=64)
    assert len(made) == before[0] + 1, made
    assert len(launched) == 7, launched


if __name__ == "__main__":
    main()
