"""Builds a model without memory, gives it memory on its device, has it filled by a load format, and packs it.

What a rank holds follows from its context alone, so any process can fill any rank's model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from app.backends import LOAD_FORMATS
from app.engine.distributed.parallel_groups import ParallelGroups
from app.engine.layers.context import BuildContext
from app.engine.layers.linear import Linear
from app.engine.layers.vocab import LMHead
from app.engine.layers.weight import Weight
from app.engine.model_info import ModelInfo
from app.engine.models import POOLING_MODELS
from app.engine.models.base import EngineModel
from app.engine.models.implementation import causal_model
from app.engine.models.load_formats.base import LoadFormat, LoadRequest, targets
from app.engine.models.pooling_model import PoolingModel
from app.engine.weight_files import format_of
from app.errors import ConfigError

ModelT = TypeVar("ModelT", EngineModel, PoolingModel)
PackedT = TypeVar("PackedT", bound=nn.Module)


def load_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> EngineModel:
    """The model of `info` on `ctx.device`, ready to run.

    Raises UnsupportedError for an unknown architecture, CheckpointError naming a missing, unexpected or misshapen
    tensor or a damaged file, ConfigError when the device is too small.
    """
    return pack(fill_model(info, ctx, load_format, seed))


def fill_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> EngineModel:
    """The same, not packed: its parameters are what a checkpoint holds."""
    request = LoadRequest(info.directory, ctx, seed, elsewhere=lambda: names_of_other_ranks(info, ctx))
    return _filled(causal_model(info), info, request, load_format)


def load_pooling_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> PoolingModel:
    """Load a model for embeddings, scores and classes. What pooling has no use for is left in the checkpoint."""
    return pack(fill_pooling_model(info, ctx, load_format, seed))


def fill_pooling_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> PoolingModel:
    """The same, not packed."""
    kind = POOLING_MODELS.load(info.architecture)
    return _filled(kind, info, LoadRequest(info.directory, ctx, seed), load_format)


def _filled(
    kind: Callable[[BuildContext, ModelInfo], ModelT], info: ModelInfo, request: LoadRequest, load_format: str
) -> ModelT:
    """Build on the meta device, allocate, fill."""
    ctx = request.ctx
    form: LoadFormat = LOAD_FORMATS.load(format_of(info.directory, load_format))()
    with torch.device("meta"):
        model = kind(ctx, info)
    offload = model.offload_layers(ctx.offload_bytes, ctx.device) if ctx.offload_bytes else None
    if offload is not None:
        offload.hold()
    try:
        _materialize(model, ctx.device)
    except torch.OutOfMemoryError as error:
        need = sum(parameter.nbytes for parameter in model.parameters()) >> 20
        raise ConfigError(f"the weights take {need} MiB, more than {ctx.device} has free", param="model") from error
    form.fill(model, request)
    if offload is not None:
        offload.attach()
    return model.eval()


def pack(model: PackedT) -> PackedT:
    """Turn what was loaded into what multiplies; returns the model."""
    for module in model.modules():
        if isinstance(module, Linear | LMHead):
            module.pack()
    return model


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter memory; a tied one once."""
    twins: dict[Weight, Weight] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            assert isinstance(parameter, Weight), f"{name} has no weight_loader"
            if not parameter.is_meta:  # it has a place already
                continue
            if parameter not in twins:
                twins[parameter] = parameter.materialize(device)
            setattr(module, name, twins[parameter])


def materialize_packed(model: nn.Module, device: torch.device) -> None:
    """Memory for what layers dropped when they packed it; without contents."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, Weight) and parameter.is_meta:
                setattr(module, name, parameter.materialize(device))


def names_of_other_ranks(info: ModelInfo, ctx: BuildContext) -> set[str]:
    """Checkpoint names that the whole model is filled from; empty where every rank takes of each of them."""
    if ctx.groups.pp.size == 1 and ctx.groups.ep.size == 1:
        return set()
    whole = replace(ctx, groups=ParallelGroups(), stage_layers=None)
    with torch.device("meta"):
        return set(targets(causal_model(info)(whole, info)))
