"""Packed weights give the plain product, at any number of rows; where they do not work nobody uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from app.kernels.gemm import GEMM_KERNELS, LEAST_PACKED_ELEMENTS, onednn, pack_weight
from app.kernels.gemm.reference import linear
from tests.kernels.instruction_sets import why_it_lacks

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not onednn.works(torch.float32), reason="this build of PyTorch has no oneDNN")


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    onednn.works.cache_clear()
    yield
    onednn.works.cache_clear()


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(0, 512, 512), (1, 640, 513), (8, 512, 512), (65, 333, 801)])
def test_equals_the_product_in_double_precision(dtype: torch.dtype, rows: int, inner: int, outer: int) -> None:
    if not onednn.works(dtype):
        pytest.skip(why_it_lacks(f"oneDNN for {dtype}"))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outer, inner, generator=generator).to(dtype)
    bias = torch.randn(outer, generator=generator).to(dtype)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    packed = pack_weight(weight)
    assert packed is not None
    # Rounding of a sum of `inner` terms of about 1 each.
    bound = {torch.float32: 1e-3, torch.bfloat16: 0.5}[dtype]
    for b in (None, bias):
        exact = linear(x.double(), weight.double(), None if b is None else b.double())
        out = packed.linear(x, b)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound)


@needs_onednn
def test_a_weight_made_in_inference_mode_and_a_strided_input() -> None:
    with torch.inference_mode():
        weight = torch.randn(512, 512)
        packed = pack_weight(weight)
        assert packed is not None
        x = torch.randn(5, 1024)[:, ::2]
        torch.testing.assert_close(packed.linear(x, None), linear(x, weight, None), rtol=0, atol=1e-3)


def test_small_weights_stay_plain() -> None:
    assert pack_weight(torch.zeros(LEAST_PACKED_ELEMENTS // 64, 63)) is None


def test_devices_and_types_without_a_kernel_stay_plain() -> None:
    assert pack_weight(torch.zeros(1024, 1024, dtype=torch.float16)) is None
    assert pack_weight(torch.zeros(1024, 1024, device="meta")) is None
    assert GEMM_KERNELS.all_on(torch.device("cuda")) == ()


@pytest.mark.parametrize("failure", ["raises", "wrong"])
def test_an_operator_that_fails_the_probe_is_not_used(
    failure: str, fresh_probe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: onednn.OneDNNWeight, x: torch.Tensor, bias: Any) -> torch.Tensor:
        if failure == "raises":
            raise RuntimeError("no such operator")
        return torch.zeros(len(x), 48, dtype=x.dtype)

    monkeypatch.setattr(onednn.OneDNNWeight, "linear", broken)
    assert pack_weight(torch.zeros(1024, 1024)) is None
