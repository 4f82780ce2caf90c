"""Quick launches find the kernel that Triton would have launched; what they do not know, and what is watched, is
Triton's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from app.kernels import quick_launch as quick_launching
from app.kernels.compile_ahead import compile_ahead
from app.kernels.quick_launch import QuickKernel, quick_launch
from tests.kernels.noted_launches import noted_launches

CPU = torch.device("cpu")


@pytest.fixture
def launched() -> Iterator[list[Any]]:
    with noted_launches() as noted:
        yield noted.launched


def some_kernel(p_x, p_y, weight, T, N, eps, C: tl.constexpr, KIND: tl.constexpr, EARLY: tl.constexpr = False):  # type: ignore[no-untyped-def]
    pass


def kernel() -> QuickKernel:
    """A new one, as its decorators make it; the interpreter's `triton.jit` makes no JITFunction."""
    made = quick_launch(JITFunction(some_kernel, do_not_specialize=["T"]))
    assert isinstance(made, QuickKernel)
    return made


BF16, FP32 = torch.zeros(32, dtype=torch.bfloat16), torch.zeros(32)
CHOICES: dict[str, list[Any]] = {
    "p_x": [BF16, BF16[8:], BF16[1:], FP32, FP32[4:], FP32[1:]],
    "p_y": [None, FP32, FP32[1:]],
    "weight": [BF16, FP32, FP32[1:], torch.nn.Parameter(FP32)],
    "T": [1, 2, 16, 1 << 31],
    "N": [1, 2, 16, 48, -16, 1 << 31, (1 << 31) + 1, -(1 << 31), True],
    "eps": [0.0, 1.0, 1e-6],
    "C": [1, 2],
    "KIND": ["silu", tl.float32, tl.bfloat16],
    "EARLY": [False, True],
    "num_warps": [4, 8],
}


def cases() -> Iterator[dict[str, Any]]:
    """The first choices with every two others."""
    first = {name: values[0] for name, values in CHOICES.items()}
    for one, two in itertools.combinations(CHOICES, 2):
        for values in itertools.product(CHOICES[one], CHOICES[two]):
            yield first | dict(zip((one, two), values, strict=True))


def test_the_kernel_that_triton_would_launch(launched: list[Any]) -> None:
    quick = kernel()
    for _ in range(2):
        for case in cases():
            quick[(3, 2)](**case)
            expected = quick.function.run(**case, grid=(3, 2), warmup=True)
            x, y, z, stream, function, metadata, *rest = launched[-1]
            assert (x, y, z, stream) == (3, 2, 1, 70)
            assert (function, metadata) == (expected.function, expected.packed_metadata), case
            given = [case[parameter.name] for parameter in quick.function.params]
            addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else value or 0 for value in given]
            sent = [value.data_ptr() if isinstance(value, torch.Tensor) else value or 0 for value in rest[3:]]
            assert sent == addresses, case
    assert len(launched) == 2 * sum(1 for _ in cases())


def test_a_kernel_beside_others_prefers_shared_memory(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(quick_launching, "prefer_shared_memory", asked.append)
    case, plain = next(cases()), kernel()
    plain[(1,)](**case)
    assert not asked
    beside = quick_launching.beside_others(JITFunction(some_kernel, do_not_specialize=["T"]))
    for _ in range(2):
        beside[(1,)](**case)
    assert asked == [launched[-1][4]], "once, the function that is launched"


def test_triton_launches_a_kernel_once(launched: list[Any]) -> None:
    quick = kernel()
    for tokens in range(1, 40):
        quick[(tokens,)](BF16, None, FP32, tokens, 48, 1e-6, C=2, KIND="silu")
    assert len(quick.compiled) == 1
    assert [call[7] is None for call in launched] == [False] + [True] * 38  # a launch of Triton's brings its hooks


def test_each_device_has_its_own(launched: list[Any]) -> None:
    quick = kernel()
    for device in (0, 1, 0, 1):
        driver.active.device = device  # type: ignore[attr-defined]
        quick[(1,)](BF16, None, FP32, 1, 48, 1e-6, C=2, KIND="silu")
    assert [(call[3], call[4]) for call in launched] == [(70, 0), (71, 1), (70, 0), (71, 1)]


def test_compiled_ahead_it_is_not_launched(launched: list[Any]) -> None:
    quick = kernel()
    for _ in range(2):  # the second time it is compiled already
        with compile_ahead(CPU):
            quick[(1,)](BF16, None, FP32, 1, 48, 1e-6, C=2, KIND="silu")
        assert launched == []
        assert not quick.compiled
    for _ in range(2):
        quick[(1,)](BF16, None, FP32, 1, 48, 1e-6, C=2, KIND="silu")
    with compile_ahead(CPU):
        quick[(1,)](BF16, None, FP32, 1, 48, 1e-6, C=2, KIND="silu")
    assert len(launched) == 2


def test_a_profiler_hears_of_every_launch(launched: list[Any]) -> None:
    quick, heard = kernel(), list[Any]()
    for hook in (None, heard.append, None):
        if hook is not None:
            knobs.runtime.launch_enter_hook.add(hook)
        for _ in range(2):
            quick[(1,)](BF16, None, FP32, 1, 48, 1e-6, C=2, KIND="silu")
        if hook is not None:
            knobs.runtime.launch_enter_hook.remove(hook)
    assert [call[7] is None for call in launched] == [False, True, False, False, True, True]
