"""Experts in plain PyTorch: the truth, and the CPU path. It looks at ids on the host, so it runs where those are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from app.kernels.fused.reference import activate, add_rms_norm
from app.kernels.gemm import Activations, materialize
from app.kernels.moe import (
    GLU,
    LEAST_SUM,
    AddToRows,
    ExpertRows,
    ExpertWeights,
    MoEOps,
    PackedExperts,
    Routing,
    RoutingRule,
)


def rounded(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """x in fp32, rounded to `dtype` where there is one."""
    return x.float() if dtype is None else x.to(dtype).float()


def split_own(logits: torch.Tensor, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(logits [T, E] of the experts that are chosen from, that of the shared ones [T, 1] where they have one)."""
    return (logits[:, :-1], logits[:, -1:]) if rule.gates_shared else (logits, None)


def best_of(x: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [..., count] of the largest, best first; of equal ones the first (torch.topk takes any)."""
    order: torch.Tensor = x.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count]


def _keep_groups(choice: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """choice [T, E] with -inf for the experts of groups that are not among the best."""
    groups = choice.view(len(choice), rule.num_groups, -1)
    best = groups.topk(min(2, groups.shape[2]), dim=-1).values if rule.group_score == "top2" else groups
    score = best.sum(-1) if rule.group_score == "top2" else best.amax(-1)
    kept = torch.zeros_like(score, dtype=torch.bool).scatter_(1, best_of(score, rule.groups_chosen), True)
    return groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)


def _sparsemixer(logits: torch.Tensor, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor]:
    left, ids, weights = logits, [], []
    for _ in range(rule.top_k):
        chosen = best_of(left, 1)
        best = left.gather(1, chosen)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * rule.jitter
        weights.append(left.masked_fill(is_far, float("-inf")).softmax(1).gather(1, chosen))
        ids.append(chosen)
        left = left.scatter(1, chosen, float("-inf"))
    return torch.cat(ids, 1), torch.cat(weights, 1)


def _choose(
    logits: torch.Tensor, rule: RoutingRule, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [T, top_k], their weights) of fp32 logits [T, E]."""
    if rule.scoring == "sparsemixer":
        return _sparsemixer(logits, rule)
    scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(1)
    choice = scores if correction is None else scores + correction
    if rule.num_groups > 1:
        choice = _keep_groups(choice, rule)
    elif correction is None:
        choice = logits
    ids = best_of(choice, rule.top_k)
    if rule.scoring == "softmax_of_chosen":
        return ids, logits.gather(1, ids).softmax(1)
    return ids, scores.gather(1, ids)


def route(
    logits: torch.Tensor,
    rule: RoutingRule,
    *,
    correction: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> Routing:
    """logits [T, E] -> the experts of each token."""
    logits, own = split_own(rounded(logits, rule.logits_dtype), rule)
    ids, weights = _choose(logits, rule, correction)
    if rule.renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + LEAST_SUM)
    return with_shared(ids, weights, None if own is None else own.sigmoid(), logits.shape[1], rule, slot_mapping)


def with_shared(
    ids: torch.Tensor,
    weights: torch.Tensor,
    own: torch.Tensor | None,
    num_experts: int,
    rule: RoutingRule,
    slot_mapping: torch.Tensor | None,
) -> Routing:
    """Chosen experts, with weights scaled as the rule says, and behind them those that every token has, which come
    after the num_experts: their weights are `own` [T, 1], or 1. Tokens without a slot go to none."""
    weights = rounded(weights * rule.scale, rule.weights_dtype)
    if rule.num_shared > 0:
        shared = torch.arange(rule.num_shared, device=ids.device) + num_experts
        ids = torch.cat((ids, shared.expand(len(ids), -1)), 1)
        given = F.pad(weights, (0, rule.num_shared), value=1.0)
        weights = given if own is None else torch.cat((weights, own.expand(-1, rule.num_shared)), 1)
    if slot_mapping is not None:
        ids = ids.masked_fill(slot_mapping[:, None] < 0, -1)
    return Routing(ids.int(), weights)


def gate(
    x: Activations,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: RoutingRule,
    *,
    correction: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> Routing:
    """x [T, C] times the gate's weight [E, C], transposed, plus bias [E], in fp32; then `route`."""
    logits = F.linear(materialize(x).float(), weight.float(), None if bias is None else bias.float())
    return route(logits, rule, correction=correction, slot_mapping=slot_mapping)


def glu(gate_up: torch.Tensor, activation: GLU) -> torch.Tensor:
    """Gate and up side by side, [T, 2 I] -> [T, I]; without a gate [T, I] -> [T, I]."""
    if activation.function == "relu2":
        return F.relu(gate_up).square()
    if activation.function == "plain_gelu":
        return F.gelu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.function == "silu" and activation.alpha != 1.0:
        activated = gate * torch.sigmoid(activation.alpha * gate)
    else:
        activated = activate(gate, activation.function)
    return activated * (up + activation.up_offset if activation.up_offset else up)


def expert_weight(weight: torch.Tensor | PackedExperts, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """One expert's [N, K]."""
    return weight[expert] if isinstance(weight, torch.Tensor) else weight.dequantize(expert).to(dtype)


class PlainRows(ExpertRows):
    """The rows themselves."""

    def __init__(self, rows: torch.Tensor, routing: Routing, *, is_weighed: bool) -> None:
        self.rows, self.routing, self.is_weighed = rows, routing, is_weighed  # [T, K, C]; weighed already

    def materialize(self) -> torch.Tensor:
        """[T, C]."""
        ids, weights = self.routing
        total = torch.zeros(self.rows.shape[0], self.rows.shape[2], dtype=torch.float32, device=self.rows.device)
        for k in range(ids.shape[1]):
            row = self.rows[:, k].float()
            row = row if self.is_weighed else row * weights[:, k, None]
            total = torch.where(ids[:, k, None] >= 0, total + row, total)
        if self.shared is not None:
            total = total + self.shared
        return total.to(self.rows.dtype)

    def add_norm(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, may_defer: bool
    ) -> tuple[Activations, torch.Tensor]:
        """Both [T, C]; never deferred."""
        return add_rms_norm(self.materialize(), residual, norm_weight, eps)


Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # rows, weight [N, K], bias [N]
Gated = Callable[[torch.Tensor, GLU], torch.Tensor]  # as `glu`


def experts(x: Activations, routing: Routing, weights: ExpertWeights) -> ExpertRows:
    """x [T, C] through its experts, one expert after another."""
    return adapted(x, routing, weights, _nothing, _nothing)


def _nothing(x: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """See AddToRows."""
    return y


def adapted(
    x: Activations, routing: Routing, weights: ExpertWeights, gate_up: AddToRows, down: AddToRows
) -> ExpertRows:
    """The same with what adapters add."""
    rows = _one_by_one(materialize(x), routing, weights, gate_up, down, F.linear, glu)
    return PlainRows(rows, routing, is_weighed=weights.weighs_input)


def rows_by(x: torch.Tensor, routing: Routing, weights: ExpertWeights, linear: Linear, gated: Gated) -> torch.Tensor:
    """x [T, C] through its experts by other products than `F.linear` and another `glu`: rows [T, K, C], unweighed."""
    return _one_by_one(x, routing, weights, _nothing, _nothing, linear, gated)


def _one_by_one(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    gate_up: AddToRows,
    down: AddToRows,
    linear: Linear,
    gated: Gated,
) -> torch.Tensor:
    ids = routing.ids.tolist()
    rows = x.new_zeros(len(x), routing.ids.shape[1], weights.down.shape[1])
    for expert in sorted({expert for chosen in ids for expert in chosen} - {-1}):
        i_t, i_k = (routing.ids == expert).nonzero(as_tuple=True)
        own = routing.ids[i_t, i_k]
        h = gate_up(x[i_t], i_t, own, linear(x[i_t], expert_weight(weights.gate_up, expert, x.dtype), None))
        if weights.weighs_input:  # what multiplies a row multiplies its product
            h = (h.float() * routing.weights[i_t, i_k, None]).to(h.dtype)
        h = h if weights.gate_up_bias is None else h + weights.gate_up_bias[expert]
        bias = None if weights.down_bias is None else weights.down_bias[expert]
        h = gated(h, weights.activation)
        rows[i_t, i_k] = down(h, i_t, own, linear(h, expert_weight(weights.down, expert, x.dtype), bias))
    return rows


def to_slots(
    ids: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """See SlotsOp."""
    expert, is_one = ids.long().clamp(min=0), ids >= 0
    if counts is not None:
        counts.scatter_add_(0, expert.flatten(), is_one.long().flatten())
    column = torch.zeros_like(expert[:, :1]) if positions is None else (positions % table.shape[1])[:, None]
    return torch.where(is_one, table[expert, column], -1)


OPS = MoEOps(route=route, gate=gate, experts=experts, adapted=adapted, to_slots=to_slots, serves=lambda _: True)
