"""Computes what every token goes through beside the experts that its gate chooses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from app.layers.context import BuildContext
from app.layers.experts.expert_linear import ExpertLinear
from app.layers.experts.settings import ExpertSettings
from app.layers.linear import Linear, MergedColumnLinear, RowLinear
from app.layers.mlp import GatedMLP
from app.layers.plain_mlp import PlainMLP
from app.quantization.plain import PLAIN_METHOD


class SharedExperts(GatedMLP):
    """A feed-forward layer; its sum over the ranks is left to the layer of experts."""

    def __init__(self, ctx: BuildContext, hidden_size: int, size: int, hidden_act: str) -> None:
        super().__init__(ctx, hidden_size, size, hidden_act, bias=False)
        self.down_proj.sums_up = False


class PlainSharedExperts(PlainMLP):
    """The same without a gate."""

    def __init__(self, ctx: BuildContext, hidden_size: int, size: int, hidden_act: str) -> None:
        super().__init__(ctx, hidden_size, size, hidden_act, bias=False)
        self.down_proj.sums_up = False


def num_among_experts(ctx: BuildContext, settings: ExpertSettings) -> int:
    """Experts that the shared layer is as wide as, where it can lie behind the others in their tensors and be computed
    in their products: two launches less, and four more where it has a gate of its own, which lies behind the others' in
    one weight. 0: it is a layer of its own."""
    s = settings
    is_alike = s.activation is None and not s.bias and s.shared_size % s.intermediate_size == 0
    is_alike &= not s.gates_shared or (not s.gate_bias and s.gate_dtype is None and s.num_identity == 0)
    is_plain, is_one = ctx.quantization is PLAIN_METHOD, s.shared_size == s.intermediate_size
    is_stored_alike = is_plain or (is_one and ctx.quantization.is_uniform)
    # Streamed weights lie elsewhere each time.
    is_apart = ctx.groups.ep.size > 1 or ctx.adapts_shared or ctx.offload_bytes > 0
    return 0 if is_apart or not (is_alike and is_stored_alike) else s.shared_size // s.intermediate_size


class SharedAmongExperts(SharedExperts):
    """Loads the shared layer under its own names, then puts it into the slots behind those of experts. Where a
    checkpoint stores it unlike them it stays a layer of its own."""

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        size: int,
        hidden_act: str,
        gate_up: ExpertLinear,
        down: ExpertLinear,
    ) -> None:
        super().__init__(ctx, hidden_size, size, hidden_act)
        self.gate_up_proj: _GateUp = _GateUp(ctx, hidden_size, size, self, gate_up)
        self.down_proj: _Down = _Down(ctx, hidden_size, size, self, down)
        gate_up.fills_spare = down.fills_spare = lambda: self.is_among

    @cached_property
    def is_among(self) -> bool:
        """True if they are stored as the experts are: known once all layers have their methods."""
        return self.gate_up_proj.place.is_alike and self.down_proj.place.is_alike


class _Place:
    """The slots behind the experts' that a layer of the shared ones fills."""

    def __init__(self, layer: Linear, owner: SharedAmongExperts, experts: ExpertLinear) -> None:
        self.layer, self.owner, self.experts = layer, owner, experts

    @property
    def is_alike(self) -> bool:
        """True if both layers' weights have the same leaves, and as many of the same entries."""
        both = self.layer.stored, self.experts.stored
        if all(weight.method is PLAIN_METHOD for weights in both for weight in weights):
            return True
        if any(len(weights) != 1 for weights in both):
            return False
        own, theirs = (weights[0] for weights in both)
        return own.method.stores_like(theirs.method, own.dtype) and own.shares == theirs.shares

    def put(self, arranged: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Move the layer's weight there; `arranged`: a plain one as the slots [S, N, K] have it."""
        stored = self.layer.stored[0]
        if stored.method is PLAIN_METHOD:
            target = self.experts.spare_slots
            target.copy_(arranged(self.layer.weight.data, target))
        else:
            self.experts.put_spare(stored.form())
        stored.drop()

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        if not all(parameter.is_meta for parameter in self.layer.parameters()):
            return None
        return self.experts.spare_slots if self.experts.packed is None else self.experts.packed


class _GateUp(MergedColumnLinear):
    takes_delta, delta_option = False, "lora_shared_experts"

    def __init__(
        self, ctx: BuildContext, hidden_size: int, size: int, owner: SharedAmongExperts, experts: ExpertLinear
    ) -> None:
        super().__init__(ctx, hidden_size, {"gate_proj": size, "up_proj": size}, bias=False)
        self.place = _Place(self, owner, experts)  # no module

    def pack(self) -> None:
        """Each expert's share of gate above that of up."""
        if self.place.owner.is_among:
            self.place.put(_gate_above_up)
        else:
            super().pack()

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        return self.place.made if self.place.owner.is_among else super().made


def _gate_above_up(weight: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return torch.cat([half.view(len(slots), -1, half.shape[1]) for half in weight.chunk(2)], dim=1)


class _Down(RowLinear):
    takes_delta, delta_option = False, "lora_shared_experts"

    def __init__(
        self, ctx: BuildContext, hidden_size: int, size: int, owner: SharedAmongExperts, experts: ExpertLinear
    ) -> None:
        super().__init__(ctx, size, hidden_size, bias=False)
        self.sums_up = False
        self.place = _Place(self, owner, experts)  # no module

    def pack(self) -> None:
        """Each expert's share of the inputs."""
        if self.place.owner.is_among:
            self.place.put(_by_inputs)
        else:
            super().pack()

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        return self.place.made if self.place.owner.is_among else super().made


def _by_inputs(weight: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return weight.view(len(weight), len(slots), -1).transpose(0, 1)
