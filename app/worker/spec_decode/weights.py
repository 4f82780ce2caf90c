"""Finds and loads the model of a drafter with weights of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.checkpoints.fields.config_json import check_config
from app.checkpoints.hub import commit_of, fetch_weights, repository_of
from app.checkpoints.json_file import read_object
from app.checkpoints.model_info import ModelInfo, resolve_model
from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.loading.load_formats.base import LoadFormat
from app.loading.load_formats.dummy import Dummy
from app.loading.load_formats.medusa import MedusaFile, has_medusa_file
from app.loading.loader import format_named
from app.models.drafters.base import Target
from app.quantization import select_quantization
from app.worker.spec_decode.base import ProposerContext


@dataclass(slots=True, frozen=True)
class DrafterSource:
    """Holds a drafter's description, and what its model is built with on this rank."""

    info: ModelInfo
    build: BuildContext
    form: LoadFormat

    @classmethod
    def of(cls, context: ProposerContext) -> DrafterSource:
        """The checkpoint that `model` names."""
        config, wanted = context.config, context.wanted
        assert wanted.model is not None, "the configuration sees to it"
        directory = resolve_model(wanted.model, wanted.revision, config.download_dir)
        load_format = "dummy" if config.load_format == "dummy" else "auto"
        if commit_of(directory) is not None and (repository := repository_of(wanted.model)) is not None:
            fetch_weights(repository, directory, config.download_dir, load_format)
        info = drafter_info(directory)
        build = build_context(context)
        method, _ = select_quantization(wanted.quantization, info.quantization_scheme, build.device, build.dtype)
        return cls(info, replace(build, quantization=method), form_of(info, load_format))

    @property
    def is_random(self) -> bool:
        """True if nothing is read."""
        return isinstance(self.form, Dummy)

    @property
    def names(self) -> Collection[str]:
        """Names of its tensors; none where it has random weights."""
        return self.form.names(self.info.directory)

    def holds(self, leaf: str) -> bool:
        """True if there is a tensor of a name that ends so."""
        return any(name.endswith(leaf) for name in self.names)


def form_of(info: ModelInfo, load_format: str) -> LoadFormat:
    """Returns what reads a drafter's files."""
    if load_format == "auto" and has_medusa_file(info.directory):
        return MedusaFile()
    return format_named(info, load_format)


def build_context(context: ProposerContext) -> BuildContext:
    """Makes a drafter's context: one stage, all ranks or each for itself, and room for positions behind a row's end."""
    given, wanted, tp = context.build, context.wanted, context.build.groups.tp
    alone = wanted.draft_tensor_parallel_size == 1
    groups = ParallelGroups() if alone else ParallelGroups(tp=tp)
    return given.of_drafter(groups, given.max_model_len + wanted.most_drafts + 1)


def drafter_info(directory: Path) -> ModelInfo:
    """The description of a drafter, of which config.json may be that of the project "speculators"."""
    file = directory / "config.json"
    hf = read_object(file)
    nested = hf.get("transformer_layer_config")
    if nested is not None and not isinstance(nested, dict):
        raise CheckpointError(f"{file}: transformer_layer_config is {nested!r:.80}, not an object", param="model")
    own: dict[str, Any] = {name: value for name, value in hf.items() if value is not None}
    merged = own if nested is None else {**nested, **own}
    merged.setdefault("architectures", ["a drafter"])  # heads name none
    check_config(merged, str(file))
    return ModelInfo(directory, merged, {})


def target_of(context: ProposerContext) -> Target:
    """The model to draft for."""
    return Target(context.model, context.info)


def own_group(context: ProposerContext) -> RankGroup | None:
    """The ranks of which each drafts for itself; None: they draft together."""
    return context.build.groups.tp if context.wanted.draft_tensor_parallel_size == 1 else None
