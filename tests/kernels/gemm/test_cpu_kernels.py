"""Products of stored weights by PyTorch's kernels for CPUs: what each promises, and which weights it does not serve."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from app.kernels.gemm import PackedWeight, aten_int4, onednn_int8
from app.kernels.gemm.aten_int4 import AtenInt4Weight
from app.kernels.gemm.fixed_rows import FixedRowsWeight
from app.kernels.gemm.int8 import Int8Weight, quantize_rows
from app.kernels.gemm.onednn_int8 import OneDNNInt8Weight
from app.kernels.gemm.parts import PackedParts
from app.kernels.gemm.tiled import fastest
from tests.kernels.gemm.tiled_weights import KINDS, Made, grouped, rows_of_int8
from tests.kernels.instruction_sets import why_it_lacks

needs_int4 = pytest.mark.skipif(not aten_int4._width(), reason="this build of PyTorch has no products of 4 bits")
needs_int8 = pytest.mark.skipif(not onednn_int8._works(), reason=why_it_lacks("products of int8"))
needs_short_way = pytest.mark.skipif(
    not (onednn_int8._works() and onednn_int8._goes_short()), reason=why_it_lacks("products of int8")
)
DTYPES = [torch.float32, torch.bfloat16]
# Outputs, inputs, group, bits
GROUPED = {
    "one block of outputs": (64, 256, 128, 4),
    "outputs that fill no block": (200, 320, 64, 4),
    "groups of 32": (70, 352, 32, 4),
    "groups of 512": (64, 1024, 512, 4),
    "one scale an output": (72, 2048, 2048, 4),
    "2 bits": (72, 256, 128, 2),
    "5 bits": (72, 256, 32, 5),
    "8 bits": (200, 384, 32, 8),
}
GROUPS_OF_16 = {"4 bits": (70, 272, 4), "2 bits": (64, 48, 2)}  # outputs, inputs, bits


def served(made: Made, dtype: torch.dtype) -> PackedWeight:
    packed = fastest(made.weight, dtype)
    assert packed is not made.weight, "no kernel took it"
    return packed


@needs_int4
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_ordered", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("is_zero_based", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("case", GROUPED)
def test_groups_equal_float64(case: str, is_zero_based: bool, is_ordered: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    columns, size, group, bits = GROUPED[case]
    made = grouped(columns, size, group, bits, is_zero_based=is_zero_based, is_ordered=is_ordered)
    packed, bias = served(made, dtype), torch.randn(columns).to(dtype)
    assert isinstance(packed, AtenInt4Weight)
    if dtype == torch.float32:
        torch.testing.assert_close(packed.dequantize().double(), made.truth, rtol=1e-5, atol=1e-5)
    for rows in (0, 1, 5, aten_int4._MOST_ROWS + 1):
        x = torch.randn(rows, size).to(dtype)
        truth = F.linear(x.double(), made.truth, bias.double())
        out = packed.linear(x, bias)
        assert out.dtype == dtype
        error = float((out.double() - truth).norm() / truth.norm()) if rows else 0.0
        assert error < (2e-6 if dtype == torch.float32 else 5e-3), rows


@needs_int4
@pytest.mark.parametrize("is_ordered", [False, True], ids=["in order", "act-order"])
@pytest.mark.parametrize("is_zero_based", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("case", GROUPS_OF_16)
def test_groups_of_16_in_bf16(case: str, is_zero_based: bool, is_ordered: bool) -> None:
    torch.manual_seed(0)
    columns, size, bits = GROUPS_OF_16[case]
    made = grouped(columns, size, 16, bits, is_zero_based=is_zero_based, is_ordered=is_ordered)
    packed, bias = served(made, torch.bfloat16), torch.randn(columns).bfloat16()
    assert isinstance(packed, AtenInt4Weight)
    assert packed.shape == (columns, size)
    torch.testing.assert_close(packed.dequantize().double(), made.truth, rtol=2e-2, atol=2e-2)
    for rows in (0, 1, 5, aten_int4._MOST_ROWS + 1):
        x = torch.randn(rows, size).bfloat16()
        truth = F.linear(x.double(), made.truth, bias.double())
        error = float((packed.linear(x, bias).double() - truth).norm() / truth.norm()) if rows else 0.0
        assert error < 5e-3, rows
    assert fastest(made.weight, torch.float32) is made.weight


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "size"), [(16, 64), (72, 300), (130, 515)])
def test_int8_equals_whole_numbers_times_scales(columns: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    made = rows_of_int8(columns, size)
    packed, bias = served(made, dtype), torch.randn(columns).to(dtype)
    assert isinstance(packed, OneDNNInt8Weight)
    torch.testing.assert_close(packed.dequantize().double(), made.truth)
    x = (torch.randn(9, size) * torch.logspace(-3, 3, 9)[:, None]).to(dtype)
    x[3] = 0.0
    numbers, scale = quantize_rows(x)
    truth = numbers.double() @ made.truth.T * scale.double() + bias.double()
    torch.testing.assert_close(packed.linear(x, bias), truth.to(dtype))
    assert packed.linear(x[:0], bias).shape == (0, columns)


@needs_int8
def test_int8_rows_have_the_same_bits_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    made = rows_of_int8(768, 2048)
    packed, x = served(made, torch.float32), torch.randn(40, 2048)
    together = packed.linear(x, None)
    for row in (0, 7, 39):
        assert torch.equal(packed.linear(x[row : row + 1], None)[0], together[row])
        assert torch.equal(packed.linear(x[row // 2 : row + 1], None)[-1], together[row])


@needs_short_way
@pytest.mark.parametrize(("columns", "size"), [(16, 64), (130, 515), (768, 2048)])
def test_a_lone_row_in_bf16_goes_a_shorter_way_to_the_same_numbers(columns: int, size: int) -> None:
    torch.manual_seed(0)
    made = rows_of_int8(columns, size)
    packed, bias = served(made, torch.bfloat16), torch.randn(columns).bfloat16()
    assert packed.even() != packed
    assert packed.even().even() == packed.even()
    for largest in (0.0, 1e-3, 1.0, 1e3):
        x = (largest * torch.randn(1, size)).bfloat16()
        for bias_or_none in (None, bias):
            short, even = packed.linear(x, bias_or_none), packed.even().linear(x, bias_or_none)
            assert short.dtype == even.dtype == torch.bfloat16
            # A number that is halfway between two may be rounded to either of them.
            torch.testing.assert_close(short, even, rtol=1e-2, atol=2e-3 * float(even.abs().max()))
    x[0, 3] = float("nan")
    assert packed.linear(x, None).isnan().all()


@needs_short_way
def test_a_lone_row_near_the_largest_number_of_bf16_stays_finite() -> None:
    packed = served(rows_of_int8(16, 64), torch.bfloat16)
    x = torch.full((1, 64), 1e36).bfloat16()
    found = packed.linear(x, None)
    assert found.isfinite().all()
    torch.testing.assert_close(found, packed.even().linear(x, None))


@needs_short_way
@pytest.mark.parametrize("failure", ["raises", "cuts off", "rounds twice"])
def test_a_short_way_that_fails_the_probe_is_not_gone(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(
        x: torch.Tensor,
        packed: torch.Tensor,
        scale: torch.Tensor,
        zeros: torch.Tensor,
        zero: int,
        input_scale: float = 1.0,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        if dtype == torch.float32:
            return right(x, packed, scale, zeros, zero, input_scale, bias)
        if failure == "raises":
            raise RuntimeError("no such type")
        if failure == "rounds twice":
            return right(x, packed, scale, zeros, zero, input_scale, None, dtype) + (
                0 if bias is None else bias.to(dtype)
            )
        exact = right(x, packed, scale, zeros, zero, input_scale, bias)
        return (exact.view(torch.int32) & -(1 << 16)).view(torch.float32).to(dtype)

    right = onednn_int8._product
    probe = onednn_int8._goes_short.__wrapped__
    monkeypatch.setattr(onednn_int8, "_product", broken)
    assert onednn_int8._works.__wrapped__()
    assert not probe()
    monkeypatch.setattr(onednn_int8, "_goes_short", probe)
    packed = served(rows_of_int8(16, 64), torch.bfloat16)
    assert isinstance(packed, OneDNNInt8Weight)
    assert not packed.has_short_way


@needs_int8
def test_products_that_must_not_tell_by_a_row_whether_others_came_go_the_even_way() -> None:
    made = rows_of_int8(130, 515)
    packed = served(made, torch.bfloat16)
    fixed = FixedRowsWeight.of(packed, (130, 515), torch.bfloat16)
    assert fixed is not None
    assert fixed.inner == packed.even()
    parts = PackedParts((packed, packed), (130, 130))
    assert parts.even() == PackedParts((packed.even(), packed.even()), (130, 130))


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_rounds_ties_to_even(dtype: torch.dtype) -> None:
    packed = served(rows_of_int8(16, 509), dtype)
    assert isinstance(packed, OneDNNInt8Weight)
    x = torch.stack((torch.arange(-254, 255) / 2, torch.arange(-254, 255) / 4)).to(dtype)  # steps of 1 and of 1/2
    kept = x.clone()
    numbers, scale = quantize_rows(x)
    rounded, got_scale, middle = packed._quantized(x)
    assert torch.equal(rounded.float() - middle, numbers)
    assert torch.equal(got_scale, scale)
    assert torch.equal(x, kept)


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [None, -20, 127])
def test_int8_activations_with_a_scale_and_a_zero(zero: int | None, dtype: torch.dtype) -> None:
    weight = torch.randint(-128, 128, (16, 64), dtype=torch.int8)
    scale, point = torch.tensor(0.05), None if zero is None else torch.tensor(float(zero))
    stored = Int8Weight.of(weight, torch.full((16, 1), 0.5), scale, point)
    packed = fastest(stored, dtype)
    assert isinstance(packed, OneDNNInt8Weight)
    x = torch.linspace(-20, 20, 5 * 64).view(5, 64).to(dtype)
    numbers = (x.float() / scale + (zero or 0)).round().clamp(-128, 127) - (zero or 0)
    truth = (numbers * scale @ (weight.float() / 2).T).to(dtype)
    torch.testing.assert_close(packed.linear(x, None), truth, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["4 bits", "4 bits, groups of 24", "nf4-like", "fp8 blocks"])
def test_weights_without_a_kernel_stay_as_they_are(name: str) -> None:
    made = KINDS[name]("cpu")
    assert fastest(made.weight, torch.bfloat16) is made.weight


def test_types_without_a_kernel_stay_as_they_are() -> None:
    made = grouped(64, 256, 128, 4, is_zero_based=False)
    assert fastest(made.weight, torch.float16) is made.weight


@needs_int4
def test_no_second_copy_of_the_codes() -> None:
    made = grouped(128, 1024, 128, 4, is_zero_based=True)
    packed = served(made, torch.bfloat16)
    assert isinstance(packed, AtenInt4Weight)
    (half,) = packed.halves
    assert half.packed.nbytes == 128 * 1024 // 2
    assert half.scales.nbytes == 128 * 1024 // 128 * 4


@pytest.mark.parametrize(("module", "probe"), [(aten_int4, "_width"), (onednn_int8, "_works")])
@pytest.mark.parametrize("failure", ["raises", "wrong"])
def test_an_operator_that_fails_the_probe_is_not_used(
    module: object, probe: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(x: torch.Tensor, codes: object, *rest: object) -> torch.Tensor:
        if failure == "raises":
            raise RuntimeError("no such operator")
        return torch.zeros(len(x), 128 if module is aten_int4 else 48)

    monkeypatch.setattr(module, "_product", broken)
    assert not getattr(module, probe).__wrapped__()
