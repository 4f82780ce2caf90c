"""An adapter's matrices, as far as this rank's layers take them, from what PEFT wrote.

The mapping is total: each tensor has a place in a layer of this rank, or of another stage, or the load fails and names
it. Where a family renames or splits what its checkpoints hold, what goes along a layer's outputs goes the same way as
a weight of the base model, whose outputs it has; the first matrix is the same for all parts. An embedding is a layer
whose inputs are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from app.checkpoints.adapters.adapter_config import PARAM
from app.checkpoints.adapters.adapter_files import AdapterFiles, LowRankEntry
from app.checkpoints.safetensors_header import TensorEntry
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.entry_tensor import entry_tensor
from app.errors import CheckpointError, UnsupportedError
from app.layers.adapted_layer import AdaptedLayer
from app.layers.experts.expert_linear import ExpertLinear
from app.layers.quantized_layer import QuantizedLayer
from app.layers.vocab import LMHead, VocabShard
from app.loading.adapter_changes import SIDES, LayerChange, changes_of
from app.loading.adapter_experts import ModulePair, expert_pairs
from app.loading.quantized_modules import quantized_parts
from app.loading.weight_update import GivenTensor
from app.models.base import EngineModel

_NAMES = {"lora_experts": "experts", "lora_shared_experts": "experts that all tokens share"}  # by what they need


@dataclass(slots=True, frozen=True)
class LayerPair:
    """The two matrices of one part of a layer, this rank's shares of them, as the file holds them: nothing is copied
    but to where it will lie."""

    module: str  # its name in the checkpoint
    layer: AdaptedLayer
    part: str  # its name in the layer, "" of one that has but one
    first: torch.Tensor  # [r, K]
    second: torch.Tensor  # [N, r]
    scale: float  # of the product

    def first_into(self, target: torch.Tensor, ranks: slice) -> None:
        """Some rows of the first matrix."""
        target.copy_(self.first[ranks])

    def second_into(self, target: torch.Tensor, ranks: slice) -> None:
        """Some columns of the second one, with the factor."""
        second = self.second[:, ranks]
        second = second if second.dtype in (target.dtype, torch.float32) else second.float()
        torch.mul(second, self.scale, out=target)

    def expect_numbers(self, dtype: torch.dtype) -> None:
        """CheckpointError: there are none in this type. For what `are_numbers` says no of as a whole."""
        for name, tensor in (("lora_A", self.first), ("lora_B", self.second.float() * self.scale)):
            if not are_numbers(tensor.to(dtype)):
                what = f"holds numbers that are none, or too large for {str(dtype).removeprefix('torch.')}"
                raise CheckpointError(f"{self.module}.{name}.weight {what}", param=PARAM)


def are_numbers(tensor: torch.Tensor) -> bool:
    """True if all of them are; asked of few large tensors, as a question takes longer than a small one's answer."""
    if not tensor.numel():  # a rank that holds no token
        return True
    low, high = tensor.aminmax()  # several times as fast as to ask each
    return bool(low.isfinite() and high.isfinite())


class AdapterReader:
    """Reads adapters for one model. `layers`: those that have room for them; `elsewhere`: names of tensors that other
    stages' layers are filled from; `extras`: whether more is taken than matrices of linear layers."""

    def __init__(
        self,
        model: EngineModel,
        layers: Iterable[AdaptedLayer],
        elsewhere: frozenset[str] = frozenset(),
        *,
        extras: bool = False,
    ) -> None:
        self._model = model
        self._layers = frozenset(layers)
        self._elsewhere = elsewhere
        self._extras = extras
        self._parts = {name: (layer, part) for name, layer, part in quantized_parts(model)}
        tied = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LMHead) and layer.tied)
        self._parts |= {name: (layer, "") for name, layer in tied}
        experts = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, ExpertLinear))
        self._elsewhere |= {one for name, layer in experts for one in _of_other_ranks(name, layer)}

    def check(self, files: AdapterFiles) -> frozenset[AdaptedLayer]:
        """The layers of this rank that it changes. CheckpointError, UnsupportedError name a tensor without a place, or
        of another size. By the header alone: what passes is no larger than the model has room for."""
        taken: set[tuple[AdaptedLayer, str]] = set()
        for module, entry in files.modules.items():
            for pair in self._modules(entry, _meta(entry.first), _meta(entry.second)):
                for layer, part, size in self._places_of(files, entry, pair):
                    if (layer, part) in taken:
                        raise CheckpointError(f"{module}: another tensor is for the same layer", param=PARAM)
                    taken.add((layer, part))
                    first, second = pair.first, pair.second
                    inputs, outputs = (size, len(second)) if entry.is_table else (first.shape[1], size)
                    self._check_sizes(module, layer, part, inputs, outputs)
                    if files.config.ties and isinstance(layer, VocabShard):
                        raise UnsupportedError(f"{module}: ensure_weight_tying is not supported", param=PARAM)
        changes = self._changes(files, None)
        for change in changes:
            change.check()
        return frozenset(layer for layer, _ in taken) | {change.layer for change in changes}

    def pairs(self, files: AdapterFiles, content: bytearray) -> list[LayerPair]:
        """The matrices of an adapter that was checked, whose file of weights holds `content`: they are views of it."""
        return [pair for entry in files.modules.values() for pair in self._of_module(files, entry, content)]

    def changes(self, files: AdapterFiles, content: bytearray) -> list[LayerChange]:
        """Returns what it holds beside them, copied. CheckpointError names what holds no numbers."""
        return self._changes(files, content)

    def _of_module(self, files: AdapterFiles, entry: LowRankEntry, content: bytearray) -> Iterator[LayerPair]:
        whole = (entry_tensor(one, content) for one in (entry.first, entry.second))
        for pair in self._modules(entry, *whole):
            if entry.is_table:
                for layer, part, _ in self._places_of(files, entry, pair):
                    inputs = layer.input_share
                    own = pair.first[:, inputs.start : inputs.start + inputs.size]
                    yield LayerPair(entry.module, layer, part, own, pair.second, entry.scale)
                continue
            for layer, part, rows in self._rows_of_pair(files, pair):
                outputs, inputs = layer.output_shares[part], layer.input_share
                own = rows.whole()[outputs.start : outputs.start + outputs.size]
                first_own = pair.first[:, inputs.start : inputs.start + inputs.size]
                yield LayerPair(entry.module, layer, part, first_own, own, entry.scale)

    def _modules(self, entry: LowRankEntry, first: torch.Tensor, second: torch.Tensor) -> Iterable[ModulePair]:
        """The modules that a pair is for, each with its two matrices: of a parameter of experts one for each."""
        if entry.num_experts:
            return expert_pairs(self._model, entry, first, second)
        return [ModulePair(entry.module, first, second)]

    def _places_of(
        self, files: AdapterFiles, entry: LowRankEntry, pair: ModulePair
    ) -> Iterator[tuple[AdaptedLayer, str, int]]:
        """The layers and parts that a module's pair is for, and how many rows of the checkpoint's weight go there."""
        found = self._rows(pair.module, pair.first.t()) if entry.is_table else self._rows_of_pair(files, pair)
        for layer, part, rows in found:
            if entry.is_table != (layer.kind == "embedding"):
                what = "an embedding" if entry.is_table else "another layer"
                raise CheckpointError(f"{pair.module}: its matrices are {what}'s; the layer is not", param=PARAM)
            yield layer, part, rows.shape[0]

    def _rows_of_pair(self, files: AdapterFiles, pair: ModulePair) -> Iterator[tuple[AdaptedLayer, str, StoredTensor]]:
        """The layers of this rank that a pair goes to, with the rows of its second matrix that each part gets."""
        if not pair.is_own:
            yield from self._rows(pair.module, _as_weight(files, pair.second))
            return
        layer, part = self._layer(pair.module, pair.module)
        if layer is not None:
            yield layer, part, GivenTensor.of(pair.module, pair.second, "the adapter")

    def _changes(self, files: AdapterFiles, content: bytearray | None) -> list[LayerChange]:
        """Without contents where there is none."""
        if files.extras and not self._extras:
            raise UnsupportedError(f"{next(iter(files.extras))}: {_needs('lora_extras')}", param=PARAM)
        found: list[LayerChange] = []
        for module, extras in files.extras.items():
            pair = files.modules.get(module)
            sides = ((side, entry) for side in SIDES if (entry := getattr(extras, side)) is not None)
            tensors = {side: _meta(entry) if content is None else entry_tensor(entry, content) for side, entry in sides}
            places = partial(self._changed, files, module, None if pair is None or not pair.is_table else pair.first)
            found += changes_of(module, tensors, places, 1.0 if pair is None else pair.scale)
        return found

    def _changed(
        self, files: AdapterFiles, module: str, table: TensorEntry | None, side: str, tensor: torch.Tensor
    ) -> Iterator[tuple[AdaptedLayer, str, torch.Tensor]]:
        """The layers and parts that a tensor beside the matrices goes to, with the rows of each. `table`: the first
        matrix of an embedding, whose outputs are the same for all of its rows."""
        if table is not None and side == "magnitude":
            for layer, part, _ in self._rows(module, _meta(table).t()):
                yield layer, part, tensor
            return
        weight = tensor if tensor.ndim == 2 else _as_weight(files, tensor.unsqueeze(1))
        for layer, part, rows in self._rows(module, weight):
            yield layer, part, rows.whole() if tensor.ndim == 2 else rows.whole().squeeze(1)

    def _rows(self, module: str, weight: torch.Tensor) -> Iterator[tuple[AdaptedLayer, str, StoredTensor]]:
        """The layers of this rank that a weight of this module goes to, with the rows that each part gets."""
        for name, rows in self._named(module, weight).items():
            layer, part = self._layer(module, name)
            if layer is not None:
                yield layer, part, rows

    def _named(self, module: str, weight: torch.Tensor) -> Mapping[str, StoredTensor]:
        """Our names of the parts that a module of the checkpoint becomes, with their rows."""
        given = GivenTensor.of(f"{module}.weight", weight, "the adapter")
        try:
            named = dict(self._model.own_tensors(given.name, given))
        except (RuntimeError, CheckpointError) as error:
            what = f"{module}: its matrices are for {list(weight.shape)}, which is no layer's: {error}"
            raise CheckpointError(what, param=PARAM) from None
        if not named and module in self._parts:  # a tied head, which checkpoints do not hold
            named = {given.name: given}
        if not named:
            raise CheckpointError(f"{module}: the model that is served has no use for this layer", param=PARAM)
        return {name.removesuffix(".weight"): rows for name, rows in named.items()}

    def _layer(self, module: str, name: str) -> tuple[AdaptedLayer | None, str]:
        """Our layer of this name, and which part of it; None: another stage has it."""
        if name not in self._parts:
            if f"{name}.weight" in self._elsewhere:
                return None, ""
            raise CheckpointError(f"{module}: the model has no such layer", param=PARAM)
        layer, part = self._parts[name]
        if isinstance(layer, AdaptedLayer) and layer in self._layers:
            return layer, part
        option = layer.delta_option if isinstance(layer, AdaptedLayer) else None
        refusal = " is not supported" if option is None else f": {_needs(option)}"
        raise UnsupportedError(f"{module}: LoRA on {_kind(layer)}{refusal}", param=PARAM)

    @staticmethod
    def _check_sizes(module: str, layer: AdaptedLayer, part: str, num_inputs: int, num_outputs: int) -> None:
        outputs, inputs = layer.output_shares[part].whole, layer.input_share.whole
        if (num_outputs, num_inputs) != (outputs, inputs):
            what = f"for {num_inputs} inputs and {num_outputs} outputs; the layer has {inputs} and {outputs}"
            raise CheckpointError(f"{module}: its matrices are {what}", param=PARAM)


def _of_other_ranks(name: str, layer: ExpertLinear) -> Iterator[str]:
    """Names of weights of the experts that other ranks hold whole."""
    experts = name.rpartition(".")[0]
    for expert in range(layer.share.num_experts):
        if expert not in layer.slots:
            yield from (f"{experts}.{expert}.{part}.weight" for part in layer.part_shares)


def _as_weight(files: AdapterFiles, second: torch.Tensor) -> torch.Tensor:
    """Rows of outputs as a checkpoint of the base model holds them."""
    return second.t() if files.config.is_transposed else second


def _meta(entry: TensorEntry) -> torch.Tensor:
    return torch.empty(entry.shape, device="meta")


def _kind(layer: QuantizedLayer) -> str:
    kinds = {"head": "the output head", "embedding": "embeddings"}
    own = _NAMES.get(layer.delta_option or "") if isinstance(layer, AdaptedLayer) else None
    return own or kinds.get(layer.kind, f"{type(layer).__name__}s")


def _needs(option: str) -> str:
    return f"start the engine with {option} for adapters of this kind"
