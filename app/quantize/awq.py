"""Scales of inputs, searched so that what rounding to 4 bits changes matters least (AWQ: Lin et al., MLSys 2024).

Inputs with large activations get larger weights, whose rounding is finer relative to them; what produces the inputs is
divided by the same scale, so that the model stays what it is: a norm's weights before q, k, v and before gate and up,
the rows of up before down, those of v before o where each query head has its own. Each scale is a power of the mean
activation; which one, the error of the layer's output over calibration texts decides. Power 0, no scale, is tried too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError
from app.kernels.gemm import Activations, materialize
from app.layers.attention import Attention
from app.layers.layer import Layer
from app.layers.linear import Linear
from app.layers.mlp import GatedMLP
from app.layers.norm import RMSNorm
from app.models.decoder import CausalLM
from app.models.decoder_layers.pre_norm import PreNormLayer
from app.quantization.forms import WeightForm
from app.quantize.layerwise import LayerObserver, LoadedLayer
from app.quantize.tensor_change import TensorChange

POWERS = tuple(step / 20 for step in range(20))
ROWS = 512  # of each input, kept to judge by
LEAST = 1e-4

Round = Callable[[torch.Tensor], WeightForm]


@dataclass(slots=True)
class InputRecord:
    """Holds what is kept of the inputs [T, K] of a layer."""

    rows_per_batch: int
    total: torch.Tensor | None = None  # sums of absolute values, [K]
    count: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)

    def take(self, x: torch.Tensor) -> None:
        """Note a batch."""
        own = x.float().abs().sum(0)
        self.total = own if self.total is None else self.total + own
        self.count += len(x)
        self.rows.append(x[:: -(-len(x) // self.rows_per_batch)].float())

    @property
    def mean(self) -> torch.Tensor:
        """Mean absolute value of each input, [K]."""
        assert self.total is not None, "nothing ran through the layer"
        return self.total / self.count


class RecordedLinear(Layer):
    """Stands in place of a linear layer, and notes its inputs."""

    def __init__(self, linear: Linear, record: InputRecord) -> None:
        super().__init__()
        self.linear, self.record = linear, record

    def forward(self, x: Activations, *epilogue: Any) -> Any:
        """See Linear.forward."""
        self.record.take(materialize(x))
        return self.linear(x, *epilogue)


class InputScaleSearch(LayerObserver):
    """Searches layer by layer. `changes`: what becomes of tensors of the checkpoint, by name."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        names: Mapping[str, str],
        chosen: Sequence[str],
        round_weight: Round,
        num_batches: int,
    ) -> None:
        """`names`: of the checkpoint's tensors, by our names; `chosen`: the weights that will be rounded."""
        self._tensors, self._names, self._chosen, self._round = tensors, names, set(chosen), round_weight
        self._shared = {name for name, count in Counter(names.values()).items() if count > 1}
        self._rows_per_batch = -(-ROWS // num_batches)
        self._recorded: dict[str, tuple[Layer, str, RecordedLinear]] = {}
        self.changes: dict[str, TensorChange] = {}

    def begin(self, layer: LoadedLayer) -> None:
        """See LayerObserver. UnsupportedError names what a family has otherwise."""
        block = _decoder_layer(layer)
        places = ((block.self_attn, "qkv_proj"), (block.self_attn, "o_proj"))
        for parent, name in (*places, (block.mlp, "gate_up_proj"), (block.mlp, "down_proj")):
            recorded = RecordedLinear(getattr(parent, name), InputRecord(self._rows_per_batch))
            self._recorded[name] = parent, name, recorded
            setattr(parent, name, recorded)

    def end(self, layer: LoadedLayer) -> None:
        """See LayerObserver."""
        attention, prefix = _decoder_layer(layer).self_attn, f"model.layers.{layer.index}"
        mlp, self_attn = f"{prefix}.mlp", f"{prefix}.self_attn"
        records = {name: recorded.record for name, (_, _, recorded) in self._recorded.items()}
        for parent, name, recorded in self._recorded.values():
            setattr(parent, name, recorded.linear)
        self._recorded.clear()
        qkv = [f"{self_attn}.{part}_proj" for part in "qkv"]
        self._after_norm(f"{prefix}.input_layernorm", qkv, records["qkv_proj"])
        gate_up = [f"{mlp}.{part}_proj" for part in ("gate", "up")]
        self._after_norm(f"{prefix}.post_attention_layernorm", gate_up, records["gate_up_proj"])
        self._after_linear(f"{mlp}.up_proj", f"{mlp}.down_proj", records["down_proj"])
        if attention.num_heads == attention.num_kv_heads:
            self._after_linear(f"{self_attn}.v_proj", f"{self_attn}.o_proj", records["o_proj"])

    def _after_norm(self, norm: str, linears: Sequence[str], record: InputRecord) -> None:
        weights = [self._weight(name) for name in linears]
        if not self._are_chosen(weights):
            return
        name = self._names[f"{norm}.weight"]
        stored = self._tensors[name].whole()
        scale = self._search(weights, record)
        # A norm is stored in few bits: what its rounding changes goes into the scale.
        divided = (stored.float() / scale.cpu()).to(stored.dtype).float()
        scale = torch.where(divided != 0, stored.float() / divided, 1.0)
        self._change(name).rows = torch.where(stored != 0, 1 / scale, 1.0)
        for weight in weights:
            self._change(weight).columns = scale

    def _after_linear(self, before: str, linear: str, record: InputRecord) -> None:
        weights = [self._weight(before), self._weight(linear)]
        if not self._are_chosen(weights):
            return
        scale = self._search(weights[1:], record).cpu()
        self._change(weights[0]).rows = 1 / scale
        if (bias := self._names.get(f"{before}.bias")) is not None:
            self._change(bias).rows = 1 / scale
        self._change(weights[1]).columns = scale

    def _search(self, names: Sequence[str], record: InputRecord) -> torch.Tensor:
        """The scale [K] with the least error of these layers' outputs."""
        rows = torch.cat(record.rows)
        weights = [self._tensors[name].whole().to(rows.device).float() for name in names]
        best, least = torch.ones_like(record.mean), torch.inf
        for power in POWERS:
            scale = record.mean.pow(power).clamp(min=LEAST)
            scale = scale / (scale.max() * scale.min()).sqrt()
            errors = [
                (rows @ (self._round(weight * scale).dequantize() / scale - weight).t()).square().sum()
                for weight in weights
            ]
            if (error := float(sum(errors))) < least:
                best, least = scale, error
        return best

    def _weight(self, module: str) -> str:
        name = self._names.get(f"{module}.weight")
        if name is None or name in self._shared:
            raise UnsupportedError(f"--awq: the checkpoint has no weight of its own for {module}")
        return name

    def _are_chosen(self, weights: Sequence[str]) -> bool:
        return self._chosen.issuperset(weights)

    def _change(self, name: str) -> TensorChange:
        return self.changes.setdefault(name, TensorChange())


def _decoder_layer(layer: LoadedLayer) -> Any:
    """Its only decoder layer. UnsupportedError where it is not made as Llama's."""
    model = layer.model
    block = model.model.layers[str(layer.index)] if isinstance(model, CausalLM) else None
    if type(block) is not PreNormLayer:
        raise UnsupportedError(f"--awq: {type(model).__name__}'s layers are not made as Llama's; leave it out")
    expected = {
        "self_attn": Attention,
        "mlp": GatedMLP,
        "input_layernorm": RMSNorm,
        "post_attention_layernorm": RMSNorm,
    }
    for name, kind in expected.items():
        if type(getattr(block, name)) is not kind:
            raise UnsupportedError(
                f"--awq: {type(model).__name__} has {type(getattr(block, name)).__name__} as {name}; leave it out"
            )
    return block
