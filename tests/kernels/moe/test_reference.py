"""Experts in plain PyTorch against float64, and routing against lists and transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from app.kernels.moe import MOE_OPS, RoutingRule
from app.kernels.moe.reference import experts, gate, route
from tests.kernels.moe.cases import CORRECTED, EPS, GLUS, RULES, make_case, true_routing, true_sum


def test_a_cpu_has_the_plain_functions() -> None:
    assert MOE_OPS.on(torch.device("cpu")).experts is experts


@pytest.mark.parametrize(("name", "corrected"), CORRECTED)
def test_routing(name: str, corrected: bool) -> None:
    rule, size = RULES[name], 64
    torch.manual_seed(1)
    logits = torch.randn(13, size + rule.gates_shared) * 2
    correction = torch.randn(size) if corrected else None
    ids, weights = route(logits, rule, correction=correction)
    true_ids, true_weights = true_routing(logits, rule, correction)
    assert ids.dtype == torch.int32
    assert ids.tolist() == true_ids
    torch.testing.assert_close(weights.double(), true_weights, rtol=4e-3 if rule.weights_dtype else 1e-5, atol=1e-7)
    if rule.weights_dtype is not None:
        assert torch.equal(weights, weights.to(rule.weights_dtype).float())


def test_equal_logits_go_to_the_lowest_experts() -> None:
    assert route(torch.zeros(3, 10), RoutingRule(4)).ids.tolist() == [[0, 1, 2, 3]] * 3
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    assert route(logits, RoutingRule(4)).ids.tolist() == [[1, 3, 2, 4]]


def test_pad_rows_go_nowhere() -> None:
    slots = torch.tensor([5, -1, 0])
    ids, _ = route(torch.randn(3, 8), RoutingRule(2, num_shared=1), slot_mapping=slots)
    assert (ids < 0).all(1).tolist() == [False, True, False]
    assert ids[0, 2] == 8


@pytest.mark.slow
def test_phi_routes_as_transformers_does() -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    torch.manual_seed(0)
    logits = torch.randn(50, 16).mul(0.1)
    weights, ids = sparsemixer(logits, jitter_eps=0.3, training=False)
    found = route(logits, RoutingRule(2, "sparsemixer", jitter=0.3))
    assert torch.equal(found.ids, ids.int())
    torch.testing.assert_close(found.weights, weights)


def test_the_gates_product_is_in_fp32() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 32).bfloat16(), torch.randn(9, 32).bfloat16(), torch.randn(9)
    logits = F.linear(x.double(), weight.double(), bias.double())
    found = gate(x, weight, bias, RoutingRule(3))
    true_ids, true_weights = true_routing(logits, RoutingRule(3))
    assert found.ids.tolist() == true_ids
    torch.testing.assert_close(found.weights.double(), true_weights, rtol=1e-5, atol=0)


@pytest.mark.parametrize("activation", GLUS)
@pytest.mark.parametrize("routed", ["random", "one", "padded"])
@pytest.mark.parametrize("weighs_input", [False, True])
def test_experts(activation: str, routed: str, weighs_input: bool) -> None:
    case = make_case(7, 5, 3, 24, 17, GLUS[activation], has_bias=True, routed=routed, weighs_input=weighs_input)
    rows = experts(case.x, case.routing, case.weights)
    torch.testing.assert_close(rows.materialize().double(), true_sum(case), rtol=1e-5, atol=1e-5)


def test_the_sum_takes_shared_layers_and_the_residual_in() -> None:
    case = make_case(5, 6, 2, 16, 8, routed="padded")
    shared, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    rows = experts(case.x, case.routing, case.weights)
    rows.shared = shared
    normed, total = rows.add_norm(residual, weight, EPS, may_defer=True)
    truth = true_sum(case, shared) + residual.double()
    torch.testing.assert_close(total.double(), truth, rtol=1e-5, atol=1e-5)
    assert isinstance(normed, torch.Tensor)
    expected = truth * (truth.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_tokens() -> None:
    case = make_case(1, 4, 2, 8, 8)
    routing = route(torch.zeros(0, 4), RoutingRule(2))
    assert experts(case.x[:0], routing, case.weights).materialize().shape == (0, 8)
