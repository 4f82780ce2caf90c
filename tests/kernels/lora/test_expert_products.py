"""Low-rank products of experts' rows, by both implementations, against float64, row by row."""

from __future__ import annotations

import pytest
import torch

from app.kernels.lora import ExpertMatrices, gathered, reference
from tests.kernels.lora.test_lora import DEVICE, DTYPES, TOLERANCE, matrices, truth

ADD = {"torch": reference.add_expert_products, "gathered": gathered.add_expert_products}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ADD)
@pytest.mark.parametrize("at_once", [1 << 20, 1], ids=["whole", "row by row"])
def test_each_row_has_its_slots_and_its_experts_matrices(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, at_once: int
) -> None:
    """Of three experts, with two parts each; what lies behind an adapter's tiles is NaN."""
    torch.manual_seed(0)
    monkeypatch.setattr(gathered, "_GATHERED_BYTES", at_once)
    parts, num_experts, num_rows = (24, 40), 3, 40
    whole = matrices(reference.OPS, 48, parts * num_experts, [4, 32, 17], 3, dtype)
    own = ExpertMatrices(
        whole.first.unflatten(2, (num_experts, len(parts))),
        whole.second.unflatten(2, (num_experts, sum(parts))),
        whole.num_tiles,
        parts,
    )
    slots, experts = torch.randint(-1, 3, (num_rows,)), torch.randint(-1, num_experts + 1, (num_rows,))
    x, y = torch.randn(num_rows, 48).to(dtype).to(DEVICE), torch.randn(num_rows, sum(parts)).to(dtype).to(DEVICE)
    every = truth(x, whole, slots.tolist(), y.repeat(1, num_experts)).unflatten(1, (num_experts, -1))
    is_one = (slots >= 0) & (experts >= 0) & (experts < num_experts)
    chosen = every[range(num_rows), experts.clamp(0, num_experts - 1)]
    expected = torch.where(is_one[:, None].to(DEVICE), chosen, y.double())
    out = ADD[kind](x, slots.int().to(DEVICE), experts.int().to(DEVICE), own, y.clone())
    torch.testing.assert_close(out.double(), expected, rtol=4 * TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    assert torch.equal(out[~is_one], y[~is_one]), "a row without an adapter changed"
