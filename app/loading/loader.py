"""Builds a model without memory, gives it memory on its device, has it filled by a load format, and packs it.

What a rank holds follows from its context alone, so any process can fill any rank's model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch
from torch import nn

from app.backends import LOAD_FORMATS
from app.checkpoints.model_info import ModelInfo
from app.checkpoints.weight_files import check_layers, format_of
from app.distributed.parallel_groups import ParallelGroups
from app.errors import ConfigError
from app.layers.context import BuildContext
from app.layers.derived_layer import derive
from app.layers.quantized_layer import QuantizedLayer
from app.layers.weight import Weight
from app.loading.load_formats.base import LoadFormat, LoadRequest, RankNames, targets
from app.loading.quantized_modules import FoundModule, store_quantized, unused_names
from app.models import MODELS, POOLING_MODELS
from app.models.base import EngineModel
from app.models.implementation import causal_model
from app.models.pooling_model import PoolingModel
from app.quantization.plain import PLAIN_METHOD

ModelT = TypeVar("ModelT", EngineModel, PoolingModel)
DrafterT = TypeVar("DrafterT", bound=EngineModel)
PackedT = TypeVar("PackedT", bound=nn.Module)


def load_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> EngineModel:
    """The model of `info` on `ctx.device`, ready to run.

    Raises UnsupportedError for an unknown architecture, CheckpointError naming a missing, unexpected or misshapen
    tensor or a damaged file, ConfigError when the device is too small.
    """
    return pack(fill_model(info, ctx, load_format, seed))


def fill_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> EngineModel:
    """The same, not packed: its parameters are what a checkpoint holds."""
    form = format_named(info, load_format)
    request = LoadRequest(info.directory, ctx, seed, elsewhere=lambda: names_of_other_ranks(info, ctx, form))
    return _filled(causal_model(info), info, request, form)


def load_drafter(
    kind: Callable[[BuildContext, ModelInfo], DrafterT], info: ModelInfo, ctx: BuildContext, form: LoadFormat
) -> DrafterT:
    """A model that drafts for another one, of `info`, which says where it lies; else as `load_model`."""
    return cast(DrafterT, pack(_filled(kind, info, LoadRequest(info.directory, ctx), form)))


def load_pooling_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> PoolingModel:
    """Load a model for embeddings, scores and classes. What pooling has no use for is left in the checkpoint."""
    return pack(fill_pooling_model(info, ctx, load_format, seed))


def fill_pooling_model(info: ModelInfo, ctx: BuildContext, load_format: str, seed: int) -> PoolingModel:
    """The same, not packed."""
    kind, form = POOLING_MODELS.load(info.architecture), format_named(info, load_format)
    return _filled(kind, info, LoadRequest(info.directory, ctx, seed), form)


def format_named(info: ModelInfo, load_format: str) -> LoadFormat:
    """The load format of that name, for this model's directory; CheckpointError where there is none."""
    form: LoadFormat = LOAD_FORMATS.load(format_of(info.directory, load_format))()
    return form


def _built(
    kind: Callable[[BuildContext, ModelInfo], ModelT], info: ModelInfo, ctx: BuildContext, form: LoadFormat
) -> ModelT:
    """The model on the meta device, its weights stored as their quantization methods say."""
    with torch.device("meta"):
        model = kind(ctx, info)
        if ctx.quantization is not PLAIN_METHOD:
            found = form.modules(model, info.directory) if info.quantization_scheme else None
            store_quantized(model, ctx.quantization, ctx.dtype, found)
    return model


def _filled(
    kind: Callable[[BuildContext, ModelInfo], ModelT], info: ModelInfo, request: LoadRequest, form: LoadFormat
) -> ModelT:
    """Build on the meta device, allocate, fill."""
    ctx = request.ctx
    if info.impl != "transformers" and (info.architecture in MODELS or info.architecture in POOLING_MODELS):
        check_layers(info.directory, form.names(info.directory), info.num_layers)
    model = _built(kind, info, ctx, form)
    offload = model.offload_layers(ctx.offload_bytes, ctx.device) if ctx.offload_bytes else None
    if offload is not None:
        offload.hold()
    try:
        _materialize(model, ctx.device)
    except RuntimeError as error:  # also torch.OutOfMemoryError
        need = sum(parameter.nbytes for parameter in model.parameters()) >> 20
        raise ConfigError(f"the weights take {need} MiB, more than {ctx.device} has free", param="model") from error
    form.fill(model, request)
    if offload is not None:
        offload.attach()
    return model.eval()


def found_modules(info: ModelInfo, ctx: BuildContext, load_format: str, *, pools: bool) -> dict[str, FoundModule]:
    """The modules of a quantized checkpoint, all stages', by our names, with what methods looked at."""
    kind = POOLING_MODELS.load(info.architecture) if pools else causal_model(info)
    whole = replace(ctx, groups=ParallelGroups(), stage_layers=None)
    with torch.device("meta"):
        model = kind(whole, info)
        found = format_named(info, load_format).modules(model, info.directory) or {}
        store_quantized(model, ctx.quantization, ctx.dtype, found)
    return found


def pack(model: PackedT) -> PackedT:
    """Turn what was loaded into what multiplies; returns the model."""
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.pack()
    derive(model)
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


def names_of_other_ranks(info: ModelInfo, ctx: BuildContext, form: LoadFormat) -> RankNames:
    """Checkpoint names of the whole model; empty where every rank takes of each of them."""
    if ctx.groups.pp.size == 1 and ctx.groups.ep.size == 1:
        return RankNames()
    whole = _built(causal_model(info), info, replace(ctx, groups=ParallelGroups(), stage_layers=None), form)
    return RankNames(frozenset(targets(whole)), frozenset(unused_names(whole)))
