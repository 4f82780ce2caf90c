"""A driver and a compiler that note what they are told, in the place of a GPU's: what is compiled, what is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from app.kernels.quick_launch import QuickKernel, quick_launch


class Driver:
    """A GPU that runs nothing."""

    def __init__(self) -> None:
        self.device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 70 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """A kernel, as Triton compiles one."""

    def __init__(self, number: int, launched: list[Any]) -> None:
        self.function, self.packed_metadata, self.launched = number, ("metadata", number), launched

    def run(self, *arguments: Any) -> None:
        """(grid, stream, function, metadata, 3 for hooks, the kernel's own)."""
        self.launched.append(arguments)

    def launch_metadata(self, *_: Any) -> None:
        return None


class NotedLaunches:
    """What was compiled, by names, and the arguments of each launch."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.launched: list[Any] = []

    def compile(self, function: Any, key: Any, _signature: Any, device: int, *_: Any) -> Compiled:
        """Stands in for JITFunction._do_compile."""
        self.compiled.append(function.__name__)
        made = function.device_caches[device][0][key] = Compiled(len(self.compiled) - 1, self.launched)
        return made


@contextmanager
def noted_launches() -> Iterator[NotedLaunches]:
    """Within the block kernels are neither compiled nor run."""
    noted, before = NotedLaunches(), driver._active
    driver.set_active(Driver())  # type: ignore[arg-type]
    try:
        with mock.patch.object(JITFunction, "_do_compile", lambda *given, **_: noted.compile(*given)):
            yield noted
    finally:
        driver._active = before


def as_compiled(kernel: Any) -> QuickKernel:
    """The kernel of a module as it is on a GPU, new, where the interpreter has its own."""
    function = kernel.function if isinstance(kernel, QuickKernel) else kernel
    options = {"do_not_specialize": function.do_not_specialize} if isinstance(kernel, QuickKernel) else kernel.kwargs
    made = quick_launch(JITFunction(function.fn, **options))
    assert isinstance(made, QuickKernel)
    return made
