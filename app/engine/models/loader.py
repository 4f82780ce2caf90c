"""Builds a model without memory, then gives each parameter its weights: from a checkpoint, or at random.

Every tensor of the checkpoint must have its place and every parameter its tensor; what does not match is an error
that names it. The loader knows no layer names: parameters say what they are filled from (app/engine/layers/weight.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from app.engine.distributed.parallel_groups import ParallelGroups
from app.engine.layers.context import BuildContext
from app.engine.layers.linear import Linear
from app.engine.layers.norm import Norm
from app.engine.layers.vocab import LMHead
from app.engine.layers.weight import ShapeMismatch, Weight
from app.engine.model_info import ModelInfo
from app.engine.models import MODELS, POOLING_MODELS
from app.engine.models.checkpoint import Checkpoint, SlicedTensor
from app.engine.models.decoder import CausalLM
from app.engine.models.kv_scales import take_kv_scales
from app.engine.models.load_progress import LoadProgress
from app.engine.models.pooling_model import PoolingModel
from app.errors import CheckpointError, ConfigError

DUMMY_STD = 0.02
Target = tuple[Weight, str]  # parameter, and which of its parts
ModelT = TypeVar("ModelT", CausalLM, PoolingModel)


def load_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> CausalLM:
    """The model of `info` on `ctx.device`, ready to run.

    Raises UnsupportedError for an unknown architecture, CheckpointError naming a missing, unexpected or misshapen
    tensor, ConfigError when the device is too small.
    """
    kind = MODELS.load(info.architecture)

    def fill(model: CausalLM) -> None:
        _fill_from_checkpoint(model, _names_of_other_stages(info, ctx), Checkpoint(info.directory).tensors)

    return _load(kind, info, ctx, None if load_format == "dummy" else fill, seed)


def load_pooling_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> PoolingModel:
    """Load a model for embeddings, scores and classes. What pooling has no use for is left in the checkpoint."""
    kind = POOLING_MODELS.load(info.architecture)

    def fill(model: PoolingModel) -> None:
        named = ((model.own_name(name), tensor) for name, tensor in Checkpoint(info.directory).tensors.items())
        _fill_from_checkpoint(model, set(), {name: tensor for name, tensor in named if name is not None})

    return _load(kind, info, ctx, None if load_format == "dummy" else fill, seed)


def _load(
    kind: type[ModelT], info: ModelInfo, ctx: BuildContext, fill: Callable[[ModelT], None] | None, seed: int
) -> ModelT:
    """Build on the meta device, allocate, fill (at random without `fill`), pack."""
    with torch.device("meta"):
        model = kind(ctx, info)
    try:
        _materialize(model, ctx.device)
    except torch.OutOfMemoryError as error:
        need = sum(parameter.nbytes for parameter in model.parameters()) >> 20
        raise ConfigError(f"the weights take {need} MiB, more than {ctx.device} has free", param="model") from error
    if fill is None:
        _fill_at_random(model, ctx.device, seed)
    else:
        fill(model)
    for module in model.modules():
        if isinstance(module, Linear | LMHead):
            module.pack()
    return model.eval()


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter memory; a tied one once."""
    twins: dict[Weight, Weight] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            assert isinstance(parameter, Weight), f"{name} has no weight_loader"
            if parameter not in twins:
                twins[parameter] = parameter.materialize(device)
            setattr(module, name, twins[parameter])


def _fill_at_random(model: nn.Module, device: torch.device, seed: int) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dtype.itemsize > 1:
            parameter.data.normal_(0.0, DUMMY_STD, generator=generator)
        else:  # stored in 8 bits, for which PyTorch draws nothing
            drawn = torch.empty(parameter.shape, device=device).normal_(0.0, 1.0, generator=generator)
            parameter.data.copy_(drawn)
    for module in model.modules():
        if isinstance(module, Norm):
            module.weight.data.fill_(1.0)


def _names_of_other_stages(info: ModelInfo, ctx: BuildContext) -> set[str]:
    """Checkpoint names that the whole model is filled from; empty without pipeline stages."""
    if ctx.groups.pp.size == 1:
        return set()
    whole = replace(ctx, groups=ParallelGroups(), stage_layers=None)
    with torch.device("meta"):
        return set(_targets(MODELS.load(info.architecture)(whole, info)))


def _fill_from_checkpoint(model: nn.Module, elsewhere: set[str], tensors: dict[str, SlicedTensor]) -> None:
    targets = _targets(model)
    tensors = take_kv_scales(model, tensors, targets.keys() | elsewhere)
    missing = sorted((targets.keys() | elsewhere) - tensors.keys())
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}", param="model")
    unexpected = sorted(name for name in tensors.keys() - targets.keys() - elsewhere if not _tolerated(name, model))
    if unexpected:
        raise CheckpointError(f"the checkpoint holds unexpected {_listed(unexpected)}", param="model")
    progress = LoadProgress(len(targets), sum(parameter.nbytes for parameter in model.parameters()))
    for name, (weight, part) in targets.items():
        try:
            weight.weight_loader(tensors[name], part)
        except ShapeMismatch as error:
            raise CheckpointError(f"{name} in {tensors[name].file} {error}", param="model") from error
        progress.tensor()


def _targets(model: nn.Module) -> dict[str, Target]:
    """Checkpoint name -> parameter. Tied parameters appear once, under their first name."""
    targets: dict[str, Target] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, Weight)
        module, _, leaf = name.rpartition(".")
        parent = module.rpartition(".")[0]
        if not parameter.spec.parts:
            targets[name] = (parameter, "")
        for part in parameter.spec.parts:
            targets[f"{parent}.{part}.{leaf}"] = (parameter, part)
    return targets


def _tolerated(name: str, model: nn.Module) -> bool:
    """Old checkpoints carry rotary tables; tied ones may carry the head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (
        isinstance(model, CausalLM) and model.tied and name == "lm_head.weight"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
