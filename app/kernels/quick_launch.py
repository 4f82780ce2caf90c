"""Launches of Triton kernels that take the host a fraction of the time that Triton's own do.

For each launch Triton binds the arguments, describes every one of them, writes the options down as a string, compares
the globals that the kernel has read, and looks up the compiled kernel by all that: some 20 us for thirty arguments. A
prefill of 2,000 tokens launches kernels faster than that. Here a function made for the kernel looks the compiled one up
by what it was compiled for, and calls what Triton would have called. Whatever is new, or unlike what these launches
know, is Triton's to launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelParam

_TRITONS_LAUNCH = JITFunction.run
_FEW_BYTES = 1 << 31
_CARVEOUT, _MOST = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


class QuickKernel:
    """A kernel as Triton's decorator makes it: `kernel[grid](*arguments, **constants_and_options)`.

    A parameter whose name begins with `p_` is a tensor on the current device or None. What a kernel reads of a
    module's globals must not change once it was launched.
    """

    def __init__(self, function: JITFunction[Any]) -> None:
        self.function = function
        self.is_beside_others = False
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # by key: what Triton calls, and its first arguments
        self._launch = _made_for(function, self.compiled, self._launch_slowly)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Launches it over a grid."""
        return partial(self._launch, grid)

    def _launch_slowly(
        self, key: tuple[Any, ...] | None, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Triton launches it, and compiles what is new; with a key, the next launch is a quick one."""
        kernel = self.function.run(*arguments, grid=grid, warmup=False, **options)
        if key is not None and kernel is not None:
            if self.is_beside_others:
                prefer_shared_memory(kernel.function)
            self.compiled[key] = (kernel.run, kernel.function, kernel.packed_metadata)


def quick_launch(function: Any) -> Any:
    """Decorates what `triton.jit` or `gluon.jit` made of a kernel that is launched by the host. In the interpreter, and
    on AMD's GPUs, whose kernels also depend on the sizes of tensors, it stays as it is."""
    if not isinstance(function, JITFunction) or torch.version.hip is not None:
        return function
    return QuickKernel(function)


def beside_others(function: Any) -> Any:
    """`quick_launch` of a kernel of few small programs, beside which the next launch is to begin. A multiprocessor's
    memory is cut into cache and shared memory anew for a kernel only while nothing runs there; the driver would cut it
    as suits this one, and the next, which wants more, would wait for its end."""
    made = quick_launch(function)
    if isinstance(made, QuickKernel):
        made.is_beside_others = True
    return made


def prefer_shared_memory(function: int) -> None:
    """Have multiprocessors that run this function of CUDA's driver keep as much shared memory as they can. A hint:
    nothing depends on it but time."""
    with suppress(OSError):  # no such library: launches that a test stands in for
        _driver_library().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVEOUT, _MOST)


@cache
def _driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def kind_of(value: Any, specialize: bool) -> Any:
    """That of an argument which the kernel is compiled for. Triton makes a constant of 1 and knows of multiples of 16,
    unless the kernel says that it should not."""
    kind = value.__class__
    if kind is int:
        size = -_FEW_BYTES <= value < _FEW_BYTES
        return (1 if value == 1 else 16 if value % 16 == 0 else 0, size) if specialize else size
    if kind is float or kind is bool or value is None:
        return kind
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    # A descriptor of the tensor memory accelerator: its box, and in Gluon how that lies in shared memory.
    return kind, value.base.dtype, *value.block_shape, getattr(value, "layout", None)


def is_watched() -> bool:
    """True if somebody has to hear of launches: a profiler of Triton's, or who put something in the launch's place."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return JITFunction.run is not _TRITONS_LAUNCH or bool(before and before.calls) or bool(after and after.calls)


def _made_for(function: JITFunction[Any], compiled: dict[Any, Any], launch_slowly: Callable[..., None]) -> Any:
    """launch(grid, *arguments, **options). It is written out for Python to compile, since a loop over a kernel's
    parameters would take longer than all else (Triton makes its own binder so)."""
    names = [parameter.name for parameter in function.params]
    pointers = {p.name: f"a_{p.name}" for p in function.params if p.name.startswith("p_") and not p.is_constexpr}
    defaults = {f"default_{p.name}": p.default for p in function.params if p.has_default}
    declared = [f"{name}=default_{name}" if f"default_{name}" in defaults else name for name in names]
    given = f"({', '.join(names)},), options"
    source = f"""
def launch(grid, {", ".join(declared)}, **options):
    {"; ".join(f"{a} = 0 if {p} is None else {p}.data_ptr()" for p, a in pointers.items())}
    if ({" | ".join(pointers.values()) or "0"}) & 15 or is_watched():
        return launch_slowly(None, grid, {given})
    device = driver.active.get_current_device()
    key = (device, {", ".join(_key_part(one, pointers) for one in function.params)}, *options.items())
    made = compiled.get(key)
    if made is None:
        return launch_slowly(key, grid, {given})
    x, y, z = (*grid, 1, 1)[:3]
    run, handle, metadata = made
    stream = driver.active.get_current_stream(device)
    run(x, y, z, stream, handle, metadata, None, None, None, {", ".join(pointers.get(name, name) for name in names)})
"""
    known = {
        "driver": driver, "compiled": compiled, "kind_of": kind_of, "is_watched": is_watched,
        "launch_slowly": launch_slowly, **defaults,
    }  # fmt: skip
    exec(compile(source, f"<launch of {function.__name__}>", "exec"), known)
    return known["launch"]


def _key_part(parameter: KernelParam, pointers: Collection[str]) -> str:
    """Python that says what of an argument stands in the key."""
    name: str = parameter.name
    if parameter.is_constexpr:
        return name
    if name in pointers:
        return f"None if {name} is None else {name}.dtype"
    return f"kind_of({name}, {not parameter.do_not_specialize})"
