"""Inputs for experts, and the truth in float64, written token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from app.kernels.moe import GLU, ExpertWeights, Routing, RoutingRule

RULES = {
    "qwen3": RoutingRule(8, renormalize=True),
    "mixtral": RoutingRule(2, renormalize=True, weights_dtype=torch.bfloat16),
    "v2-lite": RoutingRule(6, num_shared=2),
    "v2": RoutingRule(6, num_groups=8, groups_chosen=3, scale=16.0),
    "v3": RoutingRule(
        8, "sigmoid", renormalize=True, scale=2.5, num_groups=8, groups_chosen=4, group_score="top2"
    ),
    "gpt-oss": RoutingRule(4, "softmax_of_chosen", logits_dtype=torch.bfloat16, weights_dtype=torch.bfloat16),
    "llama4": RoutingRule(1, "sigmoid"),
    "phi": RoutingRule(2, "sparsemixer", jitter=0.01),
    "qwen2": RoutingRule(4, num_shared=4, gates_shared=True),
    "qwen3.5": RoutingRule(8, renormalize=True, num_shared=1, gates_shared=True, logits_dtype=torch.bfloat16),
}  # fmt: skip
GLUS = {
    "silu": GLU(),
    "gelu": GLU("gelu"),
    "gelu_tanh": GLU("gelu_tanh"),
    "relu2": GLU("relu2"),
    "plain_gelu": GLU("plain_gelu"),
    "clamped": GLU(limit=1.5, alpha=1.702, up_offset=1.0),
}
# Rules with and without a correction, which SparseMixer does not know.
CORRECTED = [(name, corrected) for name, rule in RULES.items() for corrected in (False, True)
             if not corrected or rule.scoring != "sparsemixer"]  # fmt: skip
EPS = 1e-6


@dataclass
class Case:
    """One layer's experts and what they read."""

    x: torch.Tensor
    routing: Routing
    weights: ExpertWeights

    def to(self, dtype: torch.dtype, device: str) -> Case:
        """The same numbers, rounded."""
        w = self.weights
        moved = [None if t is None else t.to(device, dtype) for t in (w.gate_up, w.down, w.gate_up_bias, w.down_bias)]
        weights = ExpertWeights(moved[0], moved[1], w.activation, moved[2], moved[3], w.weighs_input)
        return Case(self.x.to(device, dtype), Routing(*(t.to(device) for t in self.routing)), weights)


def make_case(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, intermediate: int,
    activation: GLU | None = None, *, has_bias: bool = False, routed: str = "random", weighs_input: bool = False,
) -> Case:  # fmt: skip
    """fp32; routed: "random" (some experts may be empty), "one" (all tokens choose the first experts), "padded" (some
    pairs and whole tokens go nowhere)."""
    torch.manual_seed(num_tokens * 1000 + num_experts)
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).int()
    if routed == "one":
        ids = torch.arange(top_k, dtype=torch.int32).expand(num_tokens, -1).contiguous()
    if routed == "padded":
        ids[torch.rand(ids.shape) < 0.3] = -1
        ids[-1] = -1
    activation = activation or GLU()
    rows = 2 * intermediate if activation.has_gate else intermediate
    gate_up = torch.randn(num_experts, rows, hidden) / hidden**0.5
    down = torch.randn(num_experts, hidden, intermediate) / intermediate**0.5
    biases = (torch.randn(num_experts, rows), torch.randn(num_experts, hidden)) if has_bias else (None,) * 2
    weights = ExpertWeights(gate_up, down, activation, *biases, weighs_input)
    return Case(torch.randn(num_tokens, hidden), Routing(ids, torch.rand(num_tokens, top_k)), weights)


def true_glu(gate: torch.Tensor, up: torch.Tensor, activation: GLU) -> torch.Tensor:
    """One token's activated row; without a gate `gate` is up."""
    if activation.function == "relu2":
        return gate.clamp(min=0) ** 2
    if activation.function == "plain_gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.function == "gelu":
        gate = gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
    elif activation.function == "gelu_tanh":
        gate = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + torch.exp(-activation.alpha * gate))
    return gate * (up + activation.up_offset)


def true_sum(case: Case, shared: torch.Tensor | None = None) -> torch.Tensor:
    """float64 [T, C]."""
    x, w, size = case.x.double(), case.weights, case.weights.down.shape[2]
    total = torch.zeros_like(x) if shared is None else shared.double()
    for i_t, (ids, weights) in enumerate(zip(case.routing.ids.tolist(), case.routing.weights.double(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert < 0:
                continue
            h = w.gate_up[expert].double() @ (x[i_t] * weight if w.weighs_input else x[i_t])
            h = h if w.gate_up_bias is None else h + w.gate_up_bias[expert].double()
            y = w.down[expert].double() @ true_glu(h[:size], h[size:], w.activation)
            y = y if w.down_bias is None else y + w.down_bias[expert].double()
            total[i_t] += y if w.weighs_input else y * weight
    return total


def true_routing(
    logits: torch.Tensor, rule: RoutingRule, correction: torch.Tensor | None = None
) -> tuple[list[list[int]], torch.Tensor]:
    """(ids, float64 weights before they are rounded) of logits [T, E], by lists and sorting; shared experts' own gate
    has the last one."""
    logits = (logits if rule.logits_dtype is None else logits.to(rule.logits_dtype)).double()
    all_ids, all_weights = [], []
    for row in logits.tolist():
        own = 1 / (1 + math.exp(-row.pop())) if rule.gates_shared else 1.0
        ids, weights = _true_row(row, rule, None if correction is None else correction.tolist())
        weights = [weight / sum(weights) for weight in weights] if rule.renormalize else weights
        all_ids.append(ids + [len(row) + i for i in range(rule.num_shared)])
        all_weights.append([weight * rule.scale for weight in weights] + [own] * rule.num_shared)
    return all_ids, torch.tensor(all_weights, dtype=torch.float64)


def _softmax(row: list[float]) -> list[float]:
    powers = [math.exp(number - max(row)) for number in row]
    return [power / sum(powers) for power in powers]


def _largest(row: list[float], count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]


def _true_row(row: list[float], rule: RoutingRule, correction: list[float] | None) -> tuple[list[int], list[float]]:
    if rule.scoring == "sparsemixer":
        return _true_sparsemixer(row, rule)
    scores = [1 / (1 + math.exp(-number)) for number in row] if rule.scoring == "sigmoid" else _softmax(row)
    choice = [score + (correction[i] if correction else 0) for i, score in enumerate(scores)]
    if rule.num_groups > 1:
        size = len(row) // rule.num_groups
        groups = [choice[i : i + size] for i in range(0, len(row), size)]
        worth = [max(group) if rule.group_score == "max" else sum(sorted(group)[-2:]) for group in groups]
        kept = _largest(worth, rule.groups_chosen)
        choice = [number if i // size in kept else -math.inf for i, number in enumerate(choice)]
    ids = _largest(choice, rule.top_k)
    if rule.scoring == "softmax_of_chosen":
        return ids, _softmax([row[i] for i in ids])
    return ids, [scores[i] for i in ids]


def _true_sparsemixer(row: list[float], rule: RoutingRule) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    weights = []
    for _ in range(rule.top_k):
        left = [i for i in range(len(row)) if i not in ids]
        best = min(left, key=lambda i: (-row[i], i))
        near = [i for i in left if (row[best] - row[i]) / max(abs(row[i]), row[best]) <= 2 * rule.jitter]
        weights.append(1 / sum(math.exp(row[i] - row[best]) for i in near))
        ids.append(best)
    return ids, weights
