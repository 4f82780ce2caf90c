"""Saves a model as its ranks hold it, so that each rank of that layout reads nothing but its own file.

One process makes all ranks' models, one after another on the CPU: what a rank holds follows from its number alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from app.checkpoints.model_info import ModelInfo, fetch_model_weights
from app.config.engine import EngineConfig
from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.errors import ConfigError
from app.layers.context import BuildContext
from app.loading.kv_scales import find_kv_scales
from app.loading.load_formats import open_checkpoint
from app.loading.load_formats.base import targets
from app.loading.load_formats.sharded_state import Layout, save_modules, save_rank
from app.loading.loader import fill_model, fill_pooling_model, found_modules
from app.models.implementation import check_settings
from app.quantization import select_quantization
from app.records.parallel_plan import refuse_stages
from app.worker.attention.backend import select_attention
from app.worker.device import DTYPES, select_dtype
from app.worker.placement import build_context

CPU = torch.device("cpu")
WEIGHTS = shutil.ignore_patterns("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json", ".*")


def save_sharded(config: EngineConfig, output: Path, done: Callable[[int], object] = lambda rank: None) -> None:
    """Write every rank's state and the model's other files into `output`; `done` hears of each rank.

    ConfigError where `output` is not empty; else as a start with this configuration.
    """
    info = ModelInfo.of(config)
    check_settings(info)
    fetch_model_weights(config, info)
    pools = info.runner(config.runner) == "pooling"
    if pools:
        refuse_stages(config)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is not empty: name a new directory", param="output")
    stored = open_checkpoint(info.directory)
    shutil.copytree(info.directory, output, ignore=_of_top(info.directory), dirs_exist_ok=True)
    fill = fill_pooling_model if pools else fill_model
    contexts = list(rank_contexts(config, info))
    if info.quantization_scheme:
        save_modules(found_modules(info, contexts[0], config.load_format, pools=pools), output)
    for rank, ctx in enumerate(contexts):
        model = fill(info, ctx, config.load_format, config.seed)
        scales = {name: stored[name].whole() for name in find_kv_scales(stored, targets(model).keys())}
        save_rank(model, ctx, output, scales)
        done(rank)
    Layout.of(contexts, whole_experts=config.enable_expert_parallel).save(output)


def _of_top(directory: Path) -> Callable[[str, list[str]], set[str]]:
    """Leave out the weights of the model itself; its folders (dense layers of sentence-transformers) stay whole."""
    return lambda folder, names: WEIGHTS(folder, names) if Path(folder) == directory else set()


def rank_contexts(config: EngineConfig, info: ModelInfo) -> Iterator[BuildContext]:
    """Contexts of all ranks, in their order."""
    name = info.dtype if config.dtype == "auto" and info.dtype in DTYPES else config.dtype
    dtype, _ = select_dtype(name, CPU, info)
    quantization, _ = select_quantization(None, info.quantization_scheme, CPU, dtype)
    attention, _ = select_attention("torch", CPU)
    for stage in range(config.pipeline_parallel_size):
        for rank in range(config.tensor_parallel_size):
            tp = RankGroup.unconnected(rank, config.tensor_parallel_size)
            groups = ParallelGroups(tp, RankGroup.unconnected(stage, config.pipeline_parallel_size))
            groups = groups.with_whole_experts() if config.enable_expert_parallel else groups
            yield build_context(config, info, groups, dtype, CPU, attention, quantization)
