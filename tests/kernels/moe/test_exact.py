"""Experts on a CPU whose rows depend on no other row: against float64, and a token's bits alone and among others."""

from __future__ import annotations

import pytest
import torch

from app.errors import UnsupportedError
from app.kernels.moe import GLU, MOE_OPS, Routing
from app.kernels.moe.exact import OPS, experts, gate, route
from tests.kernels.moe.cases import CORRECTED, EPS, GLUS, RULES, make_case, true_routing, true_sum

KNOWN = [(name, corrected) for name, corrected in CORRECTED if name not in ("v2", "v3", "phi")]


@pytest.mark.parametrize(("name", "corrected"), KNOWN)
def test_routing(name: str, corrected: bool) -> None:
    rule, size = RULES[name], 64
    torch.manual_seed(1)
    logits = torch.randn(13, size + rule.gates_shared) * 2
    correction = torch.randn(size) if corrected else None
    found = route(logits, rule, correction=correction)
    true_ids, true_weights = true_routing(logits, rule, correction)
    assert found.ids.tolist() == true_ids
    tolerance = 4e-3 if rule.weights_dtype else 1e-5
    torch.testing.assert_close(found.weights.double(), true_weights, rtol=tolerance, atol=1e-7)
    for token in range(13):
        alone = route(logits[token : token + 1].clone(), rule, correction=correction)
        assert torch.equal(alone.weights[0], found.weights[token])


def test_pad_rows_go_nowhere() -> None:
    ids, _ = route(torch.randn(3, 8), RULES["mixtral"], slot_mapping=torch.tensor([5, -1, 0]))
    assert (ids < 0).all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("routed", ["random", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_alone_and_together(activation: str, routed: str, dtype: torch.dtype) -> None:
    assert MOE_OPS.on(torch.device("cpu"), exact=True) is OPS
    case = make_case(40, 5, 3, 24, 17, GLUS[activation], has_bias=True, routed=routed).to(dtype, "cpu")
    residual, norm = torch.randn(40, 24).to(dtype), torch.randn(24).to(dtype)
    normed, total = experts(case.x, case.routing, case.weights).add_norm(residual, norm, EPS, may_defer=False)
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    truth = true_sum(case) + residual.double()
    torch.testing.assert_close(total.double(), truth, rtol=tolerance, atol=tolerance)
    assert isinstance(normed, torch.Tensor)
    for token in (0, 7, 39):
        one = slice(token, token + 1)
        routing = Routing(case.routing.ids[one], case.routing.weights[one])
        alone = experts(case.x[one], routing, case.weights).add_norm(residual[one], norm, EPS, may_defer=False)
        assert torch.equal(alone[1], total[one])
        assert torch.equal(alone[0], normed[one])


def test_the_gate() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(20, 32).bfloat16(), torch.randn(9, 32).bfloat16(), torch.randn(9)
    rule = RULES["mixtral"]
    found = gate(x, weight, bias, rule)
    true_ids, _ = true_routing(x.double() @ weight.double().T + bias, rule)
    assert found.ids.tolist() == true_ids
    assert torch.equal(gate(x[11:12], weight, bias, rule).weights[0], found.weights[11])


def test_what_is_not_exact_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="deterministic: this model's way to choose experts"):
        route(torch.randn(3, 64), RULES["v3"])
    case = make_case(2, 4, 2, 8, 8, GLU("relu2"))
    with pytest.raises(UnsupportedError, match="deterministic: the activation of this model's experts"):
        experts(case.x, case.routing, case.weights)
    with pytest.raises(UnsupportedError, match="deterministic: adapters of experts"):
        OPS.adapted(case.x, case.routing, case.weights, lambda *given: given[-1], lambda *given: given[-1])
