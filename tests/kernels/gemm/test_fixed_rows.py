"""Products in blocks of fixed rows: which blocks are used, and that a row's bits never depend on the others."""

from __future__ import annotations

import pytest
import torch

from app.kernels.gemm import LINEAR_OPS, fixed_rows, onednn
from app.kernels.gemm.fixed_rows import OPS, FixedRowsWeight, block_sizes, in_blocks, linear

CPU = torch.device("cpu")


def rows_of(count: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(count, size, generator=torch.Generator().manual_seed(count)) - 0.5).to(dtype)


def test_a_library_that_goes_by_the_number_of_rows_is_found_out() -> None:
    def product(x: torch.Tensor, most: int, first_differs: bool = False) -> torch.Tensor:
        """Sums x over its columns, in another order where there are more than `most` rows, or in the first row."""
        columns = list(x.unbind(1))
        total = torch.zeros(len(x))
        for column in columns[::-1] if len(x) > most else columns:
            total = total + column
        if first_differs:
            total[0] = sum(columns[::-1])[0]  # type: ignore[index]
        return total[:, None].expand(-1, 1024)  # as many outputs as need few rows

    assert block_sizes(lambda x: product(x, 1000), 40, torch.float32) == (128, 16, 1)
    assert block_sizes(lambda x: product(x, 16), 40, torch.float32) == (16, 1)
    assert block_sizes(lambda x: product(x, 1), 40, torch.float32) == (128, 16)
    assert block_sizes(lambda x: product(x, 1000, first_differs=True), 40, torch.float32) == (1,)


def test_sums_in_another_order_are_seen_behind_the_rounding_of_bf16() -> None:
    weight = (torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) / 50).bfloat16().float().T

    def product(x: torch.Tensor) -> torch.Tensor:
        """One row in another order: of 1,024 outputs in bf16, 97 times in 100 none differs."""
        wide = x.float()
        halves = wide[:, :32] @ weight[:32] + wide[:, 32:] @ weight[32:]
        return (halves if len(x) == 1 else wide @ weight).to(x.dtype)

    found = block_sizes(product, 64, torch.bfloat16)
    assert 16 in found
    assert 1 not in found


@pytest.mark.parametrize("sizes", [(128, 16, 1), (128, 16), (16, 1), (16,), (1,)])
def test_blocks_cover_all_rows_and_have_no_other_size(sizes: tuple[int, ...]) -> None:
    seen: list[int] = []

    def double(rows: torch.Tensor) -> torch.Tensor:
        assert rows.is_contiguous()
        assert rows.data_ptr() % 64 == 0
        seen.append(len(rows))
        return rows * 2

    for count in (0, 1, 2, 15, 16, 17, 130, 300):
        x = rows_of(count, 5)
        assert torch.equal(in_blocks(double, x, 5, sizes), x * 2)
    assert set(seen) <= set(sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(331, 64), (17, 300), (640, 512)])
def test_rows_alone_and_together(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    weight, bias = rows_of(num_outputs, num_inputs, dtype), rows_of(1, num_outputs, dtype)[0]
    x = rows_of(150, num_inputs, dtype)
    whole = linear(x, weight, bias)
    truth = x.double() @ weight.double().T + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole.double(), truth, rtol=tolerance, atol=tolerance)
    for first, count in ((0, 1), (149, 1), (3, 7), (20, 60)):
        assert torch.equal(linear(x[first : first + count], weight, bias), whole[first : first + count])
    if onednn.works(dtype):
        packed = onednn.pack(weight)
        assert packed is not None
        fixed = FixedRowsWeight(packed, (num_outputs, num_inputs), dtype)
        whole = fixed.linear(x, bias)
        torch.testing.assert_close(whole.double(), truth, rtol=tolerance, atol=tolerance)
        assert torch.equal(fixed.linear(x[77:80], bias), whole[77:80])


def test_a_trial_makes_no_second_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies by the weight that it is for, once for a shape; an empty one proves nothing."""
    seen: list[int] = []

    def watched(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(weight.data_ptr())
        return rows @ weight.T

    monkeypatch.setattr(fixed_rows.F, "linear", watched)
    weight, empty = rows_of(37, 41), torch.zeros(37, 41)
    for _ in range(2):
        assert fixed_rows.plain_sizes(empty)
    count = len(seen)
    assert fixed_rows.plain_sizes(weight)
    assert set(seen[count:]) == {weight.data_ptr()}
    count = len(seen)
    assert fixed_rows.plain_sizes(rows_of(37, 41) + 1.0) == fixed_rows.plain_sizes(empty)
    assert len(seen) == count


def test_what_follows_a_product() -> None:
    x, weight, residual = rows_of(3, 32), rows_of(48, 32), rows_of(3, 48)
    product = linear(x, weight, None)
    assert LINEAR_OPS.on(CPU, exact=True) is OPS
    gate, up = product.double().chunk(2, dim=1)
    gated = OPS.gated_linear(x, weight, None, "silu")
    torch.testing.assert_close(gated.double(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)
    _, total = OPS.linear_add_norm(x, weight, None, residual, torch.ones(48), 1e-5, True)
    assert torch.equal(total, product + residual)
