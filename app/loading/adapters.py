"""An adapter's matrices, as far as this rank's layers take them, from what PEFT wrote.

The mapping is total: each tensor has a place in a layer of this rank, or of another stage, or the load fails and names
it. Where a family renames or splits what its checkpoints hold, the second matrix goes the same way as a weight of the
base model, whose outputs it has; the first one is the same for all parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from app.checkpoints.adapters.adapter_config import PARAM
from app.checkpoints.adapters.adapter_files import AdapterFiles, LowRankEntry
from app.checkpoints.safetensors_header import TensorEntry
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import CheckpointError, UnsupportedError
from app.layers.linear import Linear
from app.layers.quantized_layer import QuantizedLayer
from app.loading.quantized_modules import quantized_parts
from app.loading.weight_update import GivenTensor
from app.models.base import EngineModel

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(slots=True, frozen=True)
class LayerPair:
    """The two matrices of one part of a layer, this rank's shares of them, as the file holds them: nothing is copied
    but to where it will lie."""

    module: str  # its name in the checkpoint
    layer: Linear
    part: str  # its name in the layer, "" of one that has but one
    first: torch.Tensor  # [r, K]
    second: torch.Tensor  # [N, r]
    scale: float  # of the product

    def first_into(self, target: torch.Tensor, ranks: slice) -> None:
        """Some rows of the first matrix. CheckpointError: they are no numbers in the target's type."""
        target.copy_(self.first[ranks])
        self._expect_numbers(target, "lora_A")

    def second_into(self, target: torch.Tensor, ranks: slice) -> None:
        """Some columns of the second one, with the factor. CheckpointError as above."""
        second = self.second[:, ranks]
        second = second if second.dtype in (target.dtype, torch.float32) else second.float()
        torch.mul(second, self.scale, out=target)
        self._expect_numbers(target, "lora_B")

    def _expect_numbers(self, tensor: torch.Tensor, name: str) -> None:
        low, high = tensor.aminmax()  # several times as fast as to ask each
        if not (low.isfinite() and high.isfinite()):
            what = f"holds numbers that are none, or too large for {str(tensor.dtype).removeprefix('torch.')}"
            raise CheckpointError(f"{self.module}.{name}.weight {what}", param=PARAM)


class AdapterReader:
    """Reads adapters for one model. `elsewhere`: names of tensors that other stages' layers are filled from."""

    def __init__(self, model: EngineModel, elsewhere: frozenset[str] = frozenset()) -> None:
        self._model = model
        self._elsewhere = elsewhere
        self._parts = {name: (layer, part) for name, layer, part in quantized_parts(model)}

    def check(self, files: AdapterFiles) -> None:
        """CheckpointError, UnsupportedError name a tensor without a place, or of another size. By the header alone:
        what passes is no larger than the model has room for."""
        taken: set[tuple[Linear, str]] = set()
        for module, entry in files.modules.items():
            second = torch.empty(entry.second.shape, device="meta")
            for name, rows in self._places(module, second.t() if files.config.is_transposed else second).items():
                layer, part = self._layer(module, name)
                if layer is None:
                    continue
                if (layer, part) in taken:
                    raise CheckpointError(f"{module}: another tensor is for the same layer", param=PARAM)
                taken.add((layer, part))
                self._check_sizes(module, layer, part, entry.first.shape[1], rows.shape[0])

    def pairs(self, files: AdapterFiles, content: bytearray) -> list[LayerPair]:
        """The matrices of an adapter that was checked, whose file of weights holds `content`: they are views of it."""
        return [pair for entry in files.modules.values() for pair in self._of_module(files, entry, content)]

    def _of_module(self, files: AdapterFiles, entry: LowRankEntry, content: bytearray) -> Iterator[LayerPair]:
        first, second = (self._read(one, content) for one in (entry.first, entry.second))
        places = self._places(entry.module, second.t() if files.config.is_transposed else second)
        for name, rows in places.items():
            layer, part = self._layer(entry.module, name)
            if layer is not None:
                outputs, inputs = layer.output_shares[part], layer.input_share
                own = rows.whole()[outputs.start : outputs.start + outputs.size]
                first_own = first[:, inputs.start : inputs.start + inputs.size]
                yield LayerPair(entry.module, layer, part, first_own, own, entry.scale)

    def _places(self, module: str, second: torch.Tensor) -> Mapping[str, StoredTensor]:
        """Our names of the parts that a module of the checkpoint becomes, with their rows."""
        given = GivenTensor.of(f"{module}.weight", second, "the adapter")
        try:
            named = dict(self._model.own_tensors(given.name, given))
        except (RuntimeError, CheckpointError) as error:
            what = f"{module}.lora_B.weight is {list(second.shape)}, which is no layer's: {error}"
            raise CheckpointError(what, param=PARAM) from None
        if not named:
            raise CheckpointError(f"{module}: the model that is served has no use for this layer", param=PARAM)
        return {name.removesuffix(".weight"): rows for name, rows in named.items()}

    def _layer(self, module: str, name: str) -> tuple[Linear | None, str]:
        """Our layer of this name, and which part of it; None: another stage has it."""
        if name not in self._parts:
            if f"{name}.weight" in self._elsewhere:
                return None, ""
            raise CheckpointError(f"{module}: the model has no such layer", param=PARAM)
        layer, part = self._parts[name]
        if not isinstance(layer, Linear) or not layer.takes_delta:
            raise UnsupportedError(f"{module}: LoRA on {_kind(layer)} is not supported", param=PARAM)
        return layer, part

    @staticmethod
    def _check_sizes(module: str, layer: Linear, part: str, num_inputs: int, num_outputs: int) -> None:
        outputs, inputs = layer.output_shares[part].whole, layer.input_share.whole
        if (num_outputs, num_inputs) != (outputs, inputs):
            what = f"for {num_inputs} inputs and {num_outputs} outputs; the layer has {inputs} and {outputs}"
            raise CheckpointError(f"{module}: its matrices are {what}", param=PARAM)

    @staticmethod
    def _read(entry: TensorEntry, content: bytearray) -> torch.Tensor:
        dtype = _TYPES[entry.dtype]
        count = (entry.end - entry.begin) // dtype.itemsize
        data = torch.frombuffer(memoryview(content)[entry.begin : entry.end], dtype=torch.uint8)
        if data.data_ptr() % dtype.itemsize:  # a header of odd length
            data = data.clone()
        return data.view(dtype)[:count].view(entry.shape)


def _kind(layer: QuantizedLayer) -> str:
    kinds = {"head": "the output head", "embedding": "embeddings", "experts": "experts"}
    return kinds.get(layer.kind, f"{type(layer).__name__}s")
