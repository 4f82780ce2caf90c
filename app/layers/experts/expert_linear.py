"""The weights of all experts of a rank, stacked, each filled from tensors of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from app.checkpoints.tensors.leaf import Share
from app.kernels.gemm import PackedWeight
from app.kernels.gemm.parts import UnpackedWeight
from app.kernels.moe import MOE_OPS
from app.kernels.moe.reference import expert_weight
from app.kernels.moe.stacked import StackedExperts, is_stackable, stack_experts
from app.layers.adapted_layer import AdaptedLayer
from app.layers.context import BuildContext
from app.layers.delta import PairDelta
from app.layers.experts.expert_share import ExpertShare
from app.layers.quantized_layer import LayerPart
from app.layers.stored_weight import StoredWeight
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape
from app.quantization.base import QuantMethod
from app.quantization.forms import PlainForm, WeightForm
from app.quantization.plain import PLAIN_METHOD


class ExpertLinear(AdaptedLayer):
    """weight [E, N, K], bias [E, N]; the checkpoint has `7.gate_proj.weight` and so on beside it."""

    weight: Weight  # where a quantization method stores a leaf of this name
    delta_option = "lora_experts"
    pair_delta: PairDelta | None = None  # what adapters add to products of some rows

    def __init__(
        self,
        ctx: BuildContext,
        share: ExpertShare,
        outputs: Mapping[str, Share],
        inputs: Share,
        bias: bool,
        spare: int = 0,
    ) -> None:
        """`outputs`: this rank's shares of an expert's parts, by their names in the checkpoint; `spare`: slots behind
        those of experts, for weights that somebody else puts there."""
        super().__init__()
        self.share, self.dtype, self.device, self.ops = share, ctx.dtype, ctx.device, ctx.kernels(MOE_OPS)
        self.tp = ctx.groups.tp
        self.slots = {expert: slot for slot, expert in enumerate(share.held)}
        self.part_shares, self.input_share, self.has_bias, self.spare = dict(outputs), inputs, bias, spare
        self.output_shares = {f"{expert}.{part}": one for expert in self.slots for part, one in outputs.items()}
        self.stored: list[StoredWeight] = []
        self.store(dict.fromkeys(self.quantized_parts, PLAIN_METHOD))
        spec = WeightSpec(self.load_bias, tuple(self.quantized_parts))
        size = sum(one.size for one in outputs.values())
        self.bias = Weight(torch.empty(len(self.slots), size, dtype=ctx.dtype), spec) if bias else None
        self.packed: StackedExperts | torch.Tensor | None = None  # None: the parameter, as it is
        self._held: PackedWeight | None = None  # of the spare slot, until the others are packed
        self.fills_spare: Callable[[], bool] = lambda: True  # known once all layers have their methods
        self.is_streamed = False

    @property
    def quantized_parts(self) -> Mapping[str, LayerPart]:
        """See QuantizedLayer."""
        part_of = {
            part: LayerPart(one.whole, self.input_share.whole, self.has_bias) for part, one in self.part_shares.items()
        }
        return {f"{expert}.{part}": size for expert in self.slots for part, size in part_of.items()}

    def store(self, methods: Mapping[str, QuantMethod]) -> None:
        """Parts and experts in one parameter, if their methods and entries allow it."""
        for weight in self.stored:
            weight.remove()
        parts, method = list(self.part_shares), next(iter(methods.values()))
        alike = all(methods[f"{one}.{part}"] == methods[f"{one}.{parts[0]}"] for one in self.slots for part in parts)
        alike &= all(method.stores_like(other, self.dtype) for other in methods.values())
        if alike and StoredWeight.fits(method, list(self.part_shares.values()), self.dtype):
            self.stored = [self._stored({one: methods[f"{one}.{parts[0]}"] for one in self.slots}, parts, "")]
            return
        self.stored = []
        for part in parts:
            for number, experts in enumerate(self._groups({one: methods[f"{one}.{part}"] for one in self.slots})):
                self.stored.append(self._stored(experts, [part], f"{part}_{number or ''}"))

    def _groups(self, methods: Mapping[int, QuantMethod]) -> list[dict[int, QuantMethod]]:
        """Experts whose tensors can lie in one parameter."""
        groups: list[dict[int, QuantMethod]] = []
        for expert, method in methods.items():
            like = (group for group in groups if next(iter(group.values())).stores_like(method, self.dtype))
            group = next(like, None)
            if group is None:
                groups.append({expert: method})
            else:
                group[expert] = method
        return groups

    def _stored(self, experts: Mapping[int, QuantMethod], parts: Sequence[str], prefix: str) -> StoredWeight:
        first = self.part_shares[parts[0]].offset
        outputs = {
            part: Share(one.offset - first, one.size, one.start, one.whole)
            for part, one in self.part_shares.items()
            if part in parts
        }
        return StoredWeight(
            self,
            next(iter(experts.values())),
            outputs,
            self.input_share,
            self.dtype,
            experts=experts,
            spare=self.spare,
            prefix=prefix,
        )

    def load_bias(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Have this rank's share of an expert's bias read; where ranks share its inputs, the first one adds it."""
        expert, _, part = shard_id.partition(".")
        share = self.part_shares[part]
        expect_shape(tensor, share.whole)
        target = weight.data[self.slots[int(expert)]].narrow(0, share.offset, share.size)
        if self.input_share.start:
            target.zero_()
        else:
            tensor.read_into(target, 0, share.start)

    @property
    def multiplier(self) -> StackedExperts | torch.Tensor:
        """Returns what multiplies, [E, N, K]."""
        return self.weight if self.packed is None else self.packed

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See AdaptedLayer: of all experts, one behind the other."""
        weights = (expert_weight(self.multiplier, slot, x.dtype) for slot in range(len(self.slots)))
        return torch.cat([F.linear(x, weight) for weight in weights], 1)

    @property
    def spare_slots(self) -> torch.Tensor:
        """Those behind the experts', [S, N, K]."""
        return self.weight.data[len(self.slots) :]

    @property
    def slot_tensors(self) -> list[torch.Tensor]:
        """All that an expert is made of: tensors whose first dimension is its slot."""
        weights = self.packed.tensors if isinstance(self.packed, StackedExperts) else [self.multiplier]
        return [*weights, *([] if self.bias is None else [self.bias.data])]

    def pack(self) -> None:
        """Turn the loaded tensors into what multiplies. Their shapes stay, their memory is freed."""
        if self.is_streamed or all(weight.method is PLAIN_METHOD for weight in self.stored):
            return
        each: list[list[WeightForm]] = [[] for _ in self.slots]
        for weight in self.stored:  # of each expert in the order of its parts
            for expert, form in zip(weight.experts, weight.forms(), strict=True):
                each[self.slots[expert]].append(form)
        packed = [self._packed(forms) for forms in each]
        if all(isinstance(one, UnpackedWeight) for one in packed) and len(self.stored) == 1 and self.stored[0].is_plain:
            return
        if self.spare and self.fills_spare():
            packed += [self._spare() or packed[0]] * self.spare  # the place of what comes later
        self.packed, self._held = stack_experts(packed, self.dtype, self.ops), None
        for weight in self.stored:
            weight.drop()

    def put_spare(self, form: WeightForm) -> None:
        """Take in the weight of the one slot behind the experts', which is stored as theirs are."""
        weight = self._packed([form])
        if isinstance(self.packed, StackedExperts):
            self.packed.put(len(self.slots), weight)
        elif self.packed is not None:
            self.packed[-1].copy_(cast("Any", weight).dequantize())
        else:
            self._held = weight

    def _spare(self) -> PackedWeight | None:
        """Returns what came for that slot before the experts were packed, or since they were the last time."""
        if isinstance(self.packed, StackedExperts):
            return cast("PackedWeight", self.packed.one(len(self.slots)))
        return self._held if self.packed is None else UnpackedWeight(self.packed[-1])

    def _packed(self, forms: Sequence[WeightForm]) -> PackedWeight:
        """One expert's weight [N, K], of parts that were stored apart."""
        joined: WeightForm | None = forms[0]
        for form in forms[1:]:
            joined = None if joined is None else joined.beside(form)
        if joined is None:  # parts that are unlike
            return UnpackedWeight(torch.cat([form.dequantize().to(self.dtype) for form in forms]))
        if not isinstance(joined, PlainForm) and is_stackable(packed := joined.pack()):
            return packed
        return UnpackedWeight(joined.dequantize().to(self.dtype))

    @property
    def made(self) -> object:
        """See QuantizedLayer."""
        return self.packed

    def drop_packed(self) -> None:
        """See QuantizedLayer."""
        self.packed = None


def gate_up(
    ctx: BuildContext,
    share: ExpertShare,
    hidden_size: int,
    width: int,
    bias: bool,
    spare: int = 0,
    *,
    has_gate: bool = True,
) -> ExpertLinear:
    """Gate above up, [E, 2 I, C], or up alone; `width`: an expert's, in the model."""
    own, parts = share.width, ("gate_proj", "up_proj") if has_gate else ("up_proj",)
    outputs = {part: Share(number * own, own, share.first, width) for number, part in enumerate(parts)}
    return ExpertLinear(ctx, share, outputs, Share(0, hidden_size, 0, hidden_size), bias, spare)


def down(
    ctx: BuildContext, share: ExpertShare, hidden_size: int, width: int, bias: bool, spare: int = 0
) -> ExpertLinear:
    """Back to the hidden size, [E, C, I]."""
    outputs = {"down_proj": Share(0, hidden_size, 0, hidden_size)}
    return ExpertLinear(ctx, share, outputs, Share(0, share.width, share.first, width), bias, spare)
