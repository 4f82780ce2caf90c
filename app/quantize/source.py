"""The checkpoint to be quantized: its tensors, and which of them are weights of linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from app.checkpoints.model_info import ModelInfo, fetch_model_weights
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.config.engine import EngineConfig
from app.distributed.parallel_groups import ParallelGroups
from app.errors import ConfigError, UnsupportedError
from app.layers.context import BuildContext
from app.loading.load_formats import open_checkpoint
from app.loading.quantized_modules import FoundModule, modules_of, quantized_parts
from app.models.base import EngineModel
from app.models.implementation import causal_model, runs_natively
from app.models.model_check import check_model
from app.quantization.compressed_form import CompressedForm
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")


@dataclass(slots=True, frozen=True)
class LinearModule:
    """A linear layer of the checkpoint, of which ours may be a part, or several of ours."""

    name: str
    outputs: tuple[int, ...]  # of the parts of ours that it holds
    num_inputs: int

    @property
    def weight(self) -> str:
        """Its tensor."""
        return f"{self.name}.weight"


@dataclass(slots=True, frozen=True)
class Source:
    """A language model with plain weights."""

    info: ModelInfo
    tensors: Mapping[str, StoredTensor]  # unread, by their names in the checkpoint
    names: Mapping[str, str]  # theirs, by our names
    found: Mapping[str, FoundModule]  # modules by our names
    linears: Sequence[LinearModule]

    @classmethod
    def open(cls, model: str) -> Source:
        """ConfigError, CheckpointError and UnsupportedError say why a model cannot be quantized."""
        config = EngineConfig(model=model)
        info = check_model(config)
        if info.quantization_scheme:
            method = info.quantization_scheme.get("quant_method", "unknown")
            raise ConfigError(f"MODEL: {model} is quantized already ({method}); take the checkpoint it was made from")
        if info.runner("auto") == "pooling":
            raise UnsupportedError(f"MODEL: {model} is for embeddings or scores; language models are quantized")
        if not runs_natively(info):
            raise UnsupportedError(
                f"MODEL: {info.architecture} runs through transformers' modules; those that `manta models` lists "
                "without that are quantized"
            )
        fetch_model_weights(config, info)
        tensors = open_checkpoint(info.directory)
        built = _on_meta(info)
        names = {own: name for name, tensor in tensors.items() for own, _ in built.own_tensors(name, tensor)}
        found = modules_of(built, tensors)
        return cls(info, tensors, names, found, _linears(built, tensors, found))

    def chosen(self, form: CompressedForm | None) -> list[LinearModule]:
        """The layers to quantize: all whose sizes everybody reads in this form. ConfigError where there is none."""
        if form is None:
            return []
        chosen = [linear for linear in self.linears if form.fits(linear.outputs, linear.num_inputs)]
        if not chosen:
            first = self.linears[0]
            size = f"{sum(first.outputs)} x {first.num_inputs}"
            raise ConfigError(
                f"--to: no linear layer has sizes that can be stored so ({first.name}: {size}; a multiple of "
                f"{form.inputs_per} inputs and {form.outputs_per} outputs)"
            )
        return chosen

    def ignored(self, chosen: Sequence[LinearModule]) -> list[str]:
        """Modules that other libraries may take for linear layers, and that stay as they are."""
        quantized = {linear.weight for linear in chosen}
        matrices = (name for name, x in self.tensors.items() if name.endswith(".weight") and len(x.shape) == 2)
        names = (name.removesuffix(".weight") for name in matrices if name not in quantized)
        return list(dict.fromkeys(("lm_head", *names)))


def _on_meta(info: ModelInfo) -> EngineModel:
    """The model without memory."""
    attention, _ = select_attention("torch", CPU)
    ctx = BuildContext(torch.float32, CPU, info.max_position_embeddings, attention, ParallelGroups())
    with torch.device("meta"):
        return causal_model(info)(ctx, info)


def _linears(
    model: EngineModel, tensors: Mapping[str, StoredTensor], found: Mapping[str, FoundModule]
) -> list[LinearModule]:
    """UnsupportedError names one whose weight the checkpoint holds in another form than [outputs, inputs]."""
    outputs: dict[str, list[int]] = {}
    inputs: dict[str, int] = {}
    for own, layer, part in quantized_parts(model):
        module, size = found.get(own), layer.quantized_parts[part]
        if layer.kind == "linear" and not layer.stays_plain and module is not None:
            outputs.setdefault(module.name, []).append(size.num_outputs)
            inputs[module.name] = size.num_inputs
    linears = [LinearModule(name, tuple(sizes), inputs[name]) for name, sizes in outputs.items()]
    for linear in linears:
        tensor = tensors.get(linear.weight)
        if tensor is None or tensor.shape != (sum(linear.outputs), linear.num_inputs):
            raise UnsupportedError(
                f"MODEL: {linear.name}: the checkpoint holds no weight of {sum(linear.outputs)} x {linear.num_inputs} "
                "there, but experts in one tensor or a transposed matrix; such families are not quantized"
            )
    return linears
