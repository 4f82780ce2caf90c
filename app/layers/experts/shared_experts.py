"""Computes what every token goes through beside the experts that its gate chooses."""

from __future__ import annotations

import torch

from app.layers.context import BuildContext
from app.layers.experts.expert_linear import ExpertLinear
from app.layers.experts.settings import ExpertSettings
from app.layers.layer import Layer
from app.layers.linear import MergedColumnLinear, RowLinear
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
    is_plain = ctx.quantization is PLAIN_METHOD and not ctx.offload_bytes  # streamed weights lie elsewhere each time
    is_apart = ctx.groups.ep.size > 1 or ctx.adapts_experts
    return 0 if is_apart or not (is_alike and is_plain) else s.shared_size // s.intermediate_size


class SharedAmongExperts(Layer):
    """Loads the shared layer under its own names, then puts it into the slots behind those of experts."""

    def __init__(
        self, ctx: BuildContext, hidden_size: int, size: int, gate_up: ExpertLinear, down: ExpertLinear
    ) -> None:
        super().__init__()
        self.gate_up_proj = _GateUp(ctx, hidden_size, size, gate_up)
        self.down_proj = _Down(ctx, hidden_size, size, down)


class _GateUp(MergedColumnLinear):
    takes_delta = False

    def __init__(self, ctx: BuildContext, hidden_size: int, size: int, experts: ExpertLinear) -> None:
        super().__init__(ctx, hidden_size, {"gate_proj": size, "up_proj": size}, bias=False)
        self._experts = (experts,)  # no module of this one

    def pack(self) -> None:
        """Each expert's share of gate above that of up."""
        target = self._experts[0].spare_slots
        gate, up = (half.view(len(target), -1, half.shape[1]) for half in self.weight.data.chunk(2))
        target.copy_(torch.cat((gate, up), dim=1))
        self.stored[0].drop()

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        return self._experts[0].spare_slots if self.weight.is_meta else None


class _Down(RowLinear):
    takes_delta = False

    def __init__(self, ctx: BuildContext, hidden_size: int, size: int, experts: ExpertLinear) -> None:
        super().__init__(ctx, size, hidden_size, bias=False)
        self._experts = (experts,)  # no module of this one

    def pack(self) -> None:
        """Each expert's share of the inputs."""
        target = self._experts[0].spare_slots
        weight = self.weight.data
        target.copy_(weight.view(len(weight), len(target), -1).transpose(0, 1))
        self.stored[0].drop()

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        return self._experts[0].spare_slots if self.weight.is_meta else None
