"""The table of one operation: its kernels, the best first, with what each needs of a device and which calls it serves.

What is built for a device takes the kernels that the device can run, and keeps them: steps look nothing up. Where there
are several for an operation, each says of a call how it would run it, and the first that serves it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from app.errors import ConfigError
from app.platforms import platform_of
from app.registry import load_entry

T = TypeVar("T")
P = ParamSpec("P")
HowT = TypeVar("HowT")
RunT = TypeVar("RunT")


@dataclass(slots=True, frozen=True)
class Needs:
    """Says what a kernel needs of its device: nothing, unless it says so."""

    kernels: str | None = None  # which ones its platform runs (`Platform.kernels`)
    device_type: str | None = None  # where its tensors lie
    # NVIDIA's generations (major compute capability, 9: Hopper); GPUs of others are of none.
    generations: range | None = None
    fp8_products: bool = False  # torch's (`Platform.has_fp8_products`)

    def are_met(self, device: torch.device) -> bool:
        """True if the device has it all."""
        platform = platform_of(device)
        return (
            self.kernels in (None, platform.kernels)
            and self.device_type in (None, device.type)
            and (platform.has_fp8_products or not self.fp8_products)
            and (self.generations is None or platform.capability(device)[0] in self.generations)
        )


NOTHING = Needs()
HOST = Needs(device_type="cpu")
TRITON = Needs("triton")
HOPPER = Needs(generations=range(9, 10))
FROM_AMPERE = Needs(generations=range(8, 100))
FROM_HOPPER = Needs(generations=range(9, 100))


@dataclass(slots=True, frozen=True)
class Candidate(Generic[T]):
    """A line of a table: a kernel, or "module:attribute", imported where a device has what it needs."""

    kernel: T | str
    needs: Needs = NOTHING
    # Whether what it makes of a row is the same to the bit whatever rows come with it (the option `deterministic`).
    is_exact: bool = False


class KernelTable(Generic[T]):
    """Keeps the candidates of an operation."""

    def __init__(self, operation: str, *candidates: Candidate[T]) -> None:
        self.operation, self.candidates = operation, candidates

    def on(self, device: torch.device, *, exact: bool = False) -> T:
        """The best for a device; the last one needs nothing, where a table is asked so. `exact`: the best of those that
        are; ConfigError where there is none."""
        if exact:
            return cast("T", _exact_kernel_on(self, device))
        return cast("T", _kernels_on(self, device, 1)[0])

    def all_on(self, device: torch.device) -> tuple[T, ...]:
        """Those that a device can run, the best first."""
        return _kernels_on(self, device, None)


@cache
def _kernels_on(table: KernelTable[Any], device: torch.device, most: int | None) -> tuple[Any, ...]:
    """The first `most` of them; found once."""
    found = [one.kernel for one in table.candidates if not one.is_exact and one.needs.are_met(device)]
    return tuple(load_entry(kernel) if isinstance(kernel, str) else kernel for kernel in found[:most])


@cache
def _exact_kernel_on(table: KernelTable[Any], device: torch.device) -> Any:
    found = (one.kernel for one in table.candidates if one.is_exact and one.needs.are_met(device))
    if (kernel := next(found, None)) is None:
        raise ConfigError(
            f"deterministic: this model needs {table.operation}, which are not exact on a {platform_of(device).label}",
            param="deterministic",
        )
    return load_entry(kernel) if isinstance(kernel, str) else kernel


@dataclass(slots=True, frozen=True)
class Kernel(Generic[P, HowT, RunT]):
    """One of several that do the same."""

    serves: Callable[P, HowT | None]  # how it would run a call, as its tile; None or False: it does not serve it
    run: RunT


def chosen(kernels: Sequence[Kernel[P, HowT, RunT]], *call: P.args, **more: P.kwargs) -> tuple[RunT, HowT]:
    """The launch of the first that serves a call, and how it runs it. The last one serves all."""
    for kernel in kernels:
        how = kernel.serves(*call, **more)
        if how is not None and how is not False:
            return kernel.run, how
    raise AssertionError("no kernel serves the call, not even the last one")
