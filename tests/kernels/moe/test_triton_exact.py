"""Experts on a GPU whose rows depend on no other row; the interpreter shows that they are right."""

from __future__ import annotations

import pytest
import torch

from app.errors import UnsupportedError
from app.kernels.moe import Routing
from app.kernels.moe.triton_exact import OPS
from tests.kernels.moe.cases import EPS, RULES, make_case, true_routing, true_sum


def test_against_float64() -> None:
    case = make_case(9, 5, 2, 24, 16, routed="padded")
    residual, norm = torch.randn(9, 24), torch.randn(24)
    rows = OPS.experts(case.x, case.routing, case.weights)
    torch.testing.assert_close(rows.materialize().double(), true_sum(case), rtol=1e-4, atol=1e-5)
    normed, total = rows.add_norm(residual, norm, EPS, True)
    assert isinstance(normed, torch.Tensor), "never deferred"
    truth = true_sum(case) + residual.double()
    torch.testing.assert_close(total.double(), truth, rtol=1e-4, atol=1e-5)
    truth *= (truth.square().mean(1, keepdim=True) + EPS).rsqrt() * norm
    torch.testing.assert_close(normed.double(), truth, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedError, match="deterministic: adapters of experts"):
        OPS.adapted(case.x, case.routing, case.weights, lambda *given: given[-1], lambda *given: given[-1])


def test_the_gate() -> None:
    torch.manual_seed(0)
    x, weight, rule = torch.randn(3, 32), torch.randn(9, 32), RULES["qwen3"]
    true_ids, true_weights = true_routing(x.double() @ weight.double().T, rule)
    for found in (OPS.gate(x, weight, None, rule), OPS.route(x @ weight.T, rule)):
        assert found.ids.tolist() == true_ids
        torch.testing.assert_close(found.weights.double(), true_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "hidden", "intermediate"), [(128, 2048, 768), (8, 4096, 1024), (6, 64, 48)])
def test_tokens_alone_and_together(num_experts: int, hidden: int, intermediate: int) -> None:
    rule = RULES["qwen3"] if num_experts == 128 else RULES["mixtral"]
    case = make_case(3000, num_experts, rule.top_k, hidden, intermediate).to(torch.bfloat16, "cuda")
    gate = torch.randn(num_experts, hidden).to("cuda", torch.bfloat16)
    residual, norm = (torch.randn(*shape).to("cuda", torch.bfloat16) for shape in ((3000, hidden), (hidden,)))

    def layer(rows: slice) -> tuple[Routing, torch.Tensor, torch.Tensor]:
        routing = OPS.gate(case.x[rows], gate, None, rule)
        normed, total = OPS.experts(case.x[rows], routing, case.weights).add_norm(residual[rows], norm, EPS, True)
        assert isinstance(normed, torch.Tensor)
        return routing, normed, total

    routing, normed, total = layer(slice(0, 3000))
    for start, count in ((0, 1), (2999, 1), (7, 3), (100, 8), (100, 9), (200, 65), (300, 300), (1000, 1025)):
        rows = slice(start, start + count)
        found, found_normed, found_total = layer(rows)
        assert torch.equal(found.ids, routing.ids[rows]), count
        assert torch.equal(found.weights, routing.weights[rows]), count
        assert torch.equal(found_total, total[rows]), count
        assert torch.equal(found_normed, normed[rows]), count
