"""Checkpoints of tiny models in other formats, and models filled from them, rank by rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.layers.context import BuildContext
from app.loading.loader import fill_model
from app.models.decoder import CausalLM
from app.worker.save_sharded import rank_contexts


def as_pt(source: Path, directory: Path, files: int = 1, **options: bool) -> Path:
    """A copy with pytorch_model*.bin instead of safetensors; `options` are those of torch.save."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    if files == 1:
        torch.save(tensors, directory / "pytorch_model.bin", **options)
        return directory
    places = {name: f"pytorch_model-{i % files + 1:05d}-of-{files:05d}.bin" for i, name in enumerate(names)}
    for file in set(places.values()):
        torch.save({name: tensors[name] for name in names if places[name] == file}, directory / file, **options)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def contexts(directory: Path, tp: int = 1, pp: int = 1, **options: int) -> list[BuildContext]:
    """Contexts of all ranks."""
    config = EngineConfig(model=str(directory), tensor_parallel_size=tp, pipeline_parallel_size=pp, **options)
    return list(rank_contexts(config, ModelInfo.from_directory(str(directory))))


def fill(directory: Path, load_format: str = "auto", ctx: BuildContext | None = None) -> CausalLM:
    """One rank's model, not packed."""
    info = ModelInfo.from_directory(str(directory))
    return fill_model(info, ctx or contexts(directory)[0], load_format, 0)


def state(model: CausalLM) -> dict[str, torch.Tensor]:
    """All parameters by name."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def assert_same(left: CausalLM, right: CausalLM) -> None:
    """Bit by bit."""
    ours, theirs = state(left), state(right)
    assert ours.keys() == theirs.keys()
    odd = [name for name in ours if ours[name].dtype != theirs[name].dtype or not torch.equal(ours[name], theirs[name])]
    assert not odd
