"""A feed-forward layer of experts (Shazeer et al., "Outrageously Large Neural Networks", 2017): each token goes through
a few of them, and through what all tokens share."""

from __future__ import annotations

from functools import cached_property

import torch

from app.errors import UnsupportedError
from app.kernels.fused import FUSED_OPS
from app.kernels.gemm import LINEAR_OPS, Activations, materialize
from app.kernels.moe import GLU, MOE_OPS, ExpertRows, ExpertWeights, Routing
from app.layers.activation import GATED_ACTIVATIONS
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import PLAIN, Epilogue, ResultT
from app.layers.experts.expert_linear import down, gate_up
from app.layers.experts.expert_map import ExpertMap
from app.layers.experts.expert_share import ExpertShare
from app.layers.experts.gate import Gate
from app.layers.experts.identity_experts import without_identity
from app.layers.experts.settings import ExpertSettings
from app.layers.experts.shared_experts import PlainSharedExperts, SharedAmongExperts, SharedExperts, num_among_experts
from app.layers.layer import Layer
from app.layers.replicated import ReplicatedLinear


class Experts(Layer):
    """This rank's share of all experts."""

    def __init__(
        self, ctx: BuildContext, hidden_size: int, hidden_act: str, settings: ExpertSettings, spare: int
    ) -> None:
        super().__init__()
        s = settings
        share = ExpertShare.of(ctx, s.num_experts, s.intermediate_size)
        self.activation, self.weighs_input = s.activation or _glu(hidden_act), s.weighs_input
        self.num_shared = spare
        has_gate = self.activation.has_gate
        self.gate_up_proj = gate_up(ctx, share, hidden_size, s.intermediate_size, s.bias, spare, has_gate=has_gate)
        self.down_proj = down(ctx, share, hidden_size, s.intermediate_size, s.bias, spare)
        self.map = ExpertMap(share, ctx.device) if len(share.slots) > 1 else None
        self.group = ctx.groups.ep
        self.ops = ctx.kernels(MOE_OPS)

    def forward(self, x: Activations, routing: Routing, ctx: ForwardContext) -> ExpertRows:
        """x [T, C] and the model's numbers of its experts -> what those of this rank give."""
        if self.map is not None:
            routing = self.map.of_rank(routing, ctx.positions)
        weights = ExpertWeights(
            gate_up=self.gate_up_proj.multiplier,
            down=self.down_proj.multiplier,
            activation=self.activation,
            gate_up_bias=self.gate_up_proj.bias,
            down_bias=self.down_proj.bias,
            weighs_input=self.weighs_input,
            num_shared=self.num_shared,
        )
        first, second = self.gate_up_proj.pair_delta, self.down_proj.pair_delta
        if first is not None and second is not None and first.is_wanted:
            return self.ops.adapted(x, routing, weights, first.add, second.add)
        return self.ops.experts(x, routing, weights)

    @property
    def slot_tensors(self) -> list[torch.Tensor]:
        """All that an expert is made of on this rank: tensors whose first dimension is its slot."""
        return [*self.gate_up_proj.slot_tensors, *self.down_proj.slot_tensors]


def _glu(hidden_act: str) -> GLU:
    if hidden_act not in GATED_ACTIVATIONS:
        known = ", ".join(sorted(GATED_ACTIVATIONS))
        raise UnsupportedError(f"unknown hidden_act {hidden_act!r} of experts; known: {known}", param="model")
    return GLU(GATED_ACTIVATIONS[hidden_act])


class ExpertMLP(Layer):
    """The experts' sum, and that of what all tokens share."""

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        hidden_act: str,
        settings: ExpertSettings,
        expert_size: int | None = None,
    ) -> None:
        """`expert_size`: of what experts read and give; None: the hidden size."""
        super().__init__()
        s, num_shared = settings, num_among_experts(ctx, settings) if expert_size is None else 0
        self.gate = Gate(ctx, hidden_size, s, num_shared)
        self.experts = Experts(ctx, expert_size or hidden_size, hidden_act, s, num_shared)
        self.shared_experts: SharedExperts | PlainSharedExperts | SharedAmongExperts | None = None
        if num_shared:
            places = self.experts.gate_up_proj, self.experts.down_proj
            self.shared_experts = SharedAmongExperts(ctx, hidden_size, s.shared_size, hidden_act, *places)
        elif s.shared_size:
            kind = SharedExperts if self.experts.activation.has_gate else PlainSharedExperts
            self.shared_experts = kind(ctx, hidden_size, s.shared_size, hidden_act)
        is_gated = s.gates_shared and not num_shared  # else by a row of the gate
        self.shared_expert_gate = ReplicatedLinear(ctx, hidden_size, 1, bias=False) if is_gated else None
        self.gates_shared = s.gates_shared
        self.num_experts, self.num_identity = s.num_experts, s.num_identity
        self.tp = ctx.groups.tp
        self.linear, self.sigmoid = ctx.kernels(LINEAR_OPS).linear, ctx.kernels(FUSED_OPS).sigmoid

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it."""
        if self._is_apart and self.gate.rule.num_shared:
            self.gate.leave_shared()
            self.experts.num_shared = 0
        routing, kept = self.gate.choose(x, ctx), None
        if self.num_identity:
            routing, kept = without_identity(routing, self.num_experts)
        rows: ExpertRows = self.experts(x, routing, ctx)
        rows.shared = self._shared(x)
        if kept is not None and self.tp.rank == 0:  # once among the ranks' sums
            read = materialize(x)
            own = (read.float() * kept).to(read.dtype)
            rows.shared = own if rows.shared is None else rows.shared + own
        if self.tp.size > 1:
            return epilogue.after_all_reduce(self.tp, rows.materialize())
        return epilogue.after_experts(rows)

    @cached_property
    def _is_apart(self) -> bool:
        """True if what tokens share is computed beside the experts."""
        among = isinstance(self.shared_experts, SharedAmongExperts) and self.shared_experts.is_among
        return self.shared_experts is not None and not among

    def _shared(self, x: Activations) -> torch.Tensor | None:
        if self.shared_experts is None or not self._is_apart:
            return None
        shared: torch.Tensor = self.shared_experts(x, PLAIN)
        if not self.gates_shared:
            return shared
        gate = self.gate.of_shared if self.shared_expert_gate is None else self.shared_expert_gate.multiplier
        return self.sigmoid(self.linear(x, gate, None)) * shared
