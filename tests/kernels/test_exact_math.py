"""Functions of IEEE operations against float64, and a number's bits in tensors of all shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from app.kernels import exact_math

FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "exp": (exact_math.exp, torch.exp),
    "sigmoid": (exact_math.sigmoid, torch.sigmoid),
    "tanh": (exact_math.tanh, torch.tanh),
    "silu": (exact_math.silu, F.silu),
    "gelu": (exact_math.gelu, F.gelu),
    "gelu_tanh": (exact_math.gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_float64(name: str) -> None:
    found, truth = FUNCTIONS[name]
    x = torch.linspace(-20.0, 20.0, 40_001)
    torch.testing.assert_close(found(x).double(), truth(x.double()), rtol=2e-6, atol=4e-7)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_in_any_tensor(name: str) -> None:
    function = FUNCTIONS[name][0]
    x = torch.randn(7, 1037, generator=torch.Generator().manual_seed(0)) * 8
    whole = function(x)
    for row in range(7):
        assert torch.equal(function(x[row]), whole[row])
    for size in (1, 3, 16, 31):
        assert torch.equal(function(x[:, 5 : 5 + size]), whole[:, 5 : 5 + size])


def test_ends() -> None:
    inf = float("inf")
    assert exact_math.exp(torch.tensor([-inf, 0.0, -200.0, 200.0])).tolist() == [0.0, 1.0, 0.0, inf]
    assert exact_math.exp(torch.tensor([float("nan")])).isnan().all()
    assert exact_math.silu(torch.tensor([-300.0, 300.0])).tolist() == [0.0, 300.0]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 100, 1023])
def test_a_sum(size: int) -> None:
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
    found = exact_math.tree_sum(x)
    torch.testing.assert_close(found.double(), x.double().sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[2:3], exact_math.tree_sum(x[2:3].clone()))
    padded = F.pad(x, (0, (1 << (size - 1).bit_length()) - size))
    assert torch.equal(found, exact_math.tree_sum(padded)), "the same tree"


def test_softmax_and_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 100, generator=generator) * 4, torch.randn(100, generator=generator)
    torch.testing.assert_close(exact_math.softmax(x).double(), x.double().softmax(-1), rtol=3e-6, atol=1e-8)
    torch.testing.assert_close(exact_math.rsqrt(x.square()).double(), x.double().abs().reciprocal(), rtol=1e-7, atol=0)
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
        rows, factor = x.to(dtype), weight.to(dtype)
        found = exact_math.rms_norm(rows, factor, 1e-5)
        truth = F.rms_norm(rows.double(), (100,), factor.double(), 1e-5)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), truth, rtol=tolerance, atol=tolerance)
        assert all(torch.equal(exact_math.rms_norm(rows[i : i + 1], factor, 1e-5)[0], found[i]) for i in range(9))
