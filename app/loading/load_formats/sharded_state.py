"""Sharded state: what each rank of one layout (TP, PP) holds, in files of its own, which it reads without a cut.

Rank r has `model-rank-R-part-P.safetensors`, under the names of Manta's own parameters; `sharded_state.json` says for
which layout they were saved. The idea and the files' names are vLLM's (`load_format=sharded_state`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from app.checkpoints.json_file import read_object
from app.checkpoints.tensors.reader import Reader
from app.checkpoints.weight_files import SHARDED_MANIFEST
from app.errors import CheckpointError, ConfigError
from app.layers.context import BuildContext
from app.layers.weight import expect_shape
from app.loading.kv_scales import take_kv_scales
from app.loading.load_formats.base import LoadFormat, LoadRequest, listed, named, targets
from app.loading.load_formats.safetensors import open_files
from app.loading.quantized_modules import FoundModule, SeenTensor
from app.models.base import EngineModel

MOST_FILE_BYTES = 5 << 30
MODULES = "quantized-modules.safetensors"


@dataclass(slots=True, frozen=True)
class Layout:
    """Says how a model is laid over ranks: layers a stage, ranks a stage."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_partition: tuple[int, ...]
    expert_parallel: bool = False  # ranks hold whole experts
    redundant_experts: int | None = None  # copies of experts in a layer; None: experts do not move

    @classmethod
    def of(cls, contexts: Sequence[BuildContext], *, whole_experts: bool) -> Layout:
        """The layout of all ranks, in their order."""
        first = contexts[0]
        stages = [ctx.stage_layers for ctx in contexts if ctx.groups.tp.rank == 0]
        partition = tuple(len(layers) for layers in stages if layers is not None)
        return cls(first.groups.tp.size, first.groups.pp.size, partition, whole_experts, first.redundant_experts)

    def __str__(self) -> str:
        stages = "+".join(map(str, self.pipeline_partition))
        experts = ", whole experts a rank" if self.expert_parallel else ""
        experts += _of_balance(self.redundant_experts)
        return f"TP {self.tensor_parallel_size} x PP {self.pipeline_parallel_size} (layers {stages}{experts})"

    def save(self, directory: Path) -> None:
        """Written last: a directory without it is not complete."""
        (directory / SHARDED_MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Layout:
        """CheckpointError where the directory has none."""
        file = directory / SHARDED_MANIFEST
        if not file.is_file():
            raise CheckpointError(
                f"{directory} holds no {SHARDED_MANIFEST}: save it with `manta save-sharded`", param="load_format"
            )
        try:
            fields = read_object(file)
            layout = cls(**{**fields, "pipeline_partition": tuple(fields["pipeline_partition"])})
            if len(layout.pipeline_partition) != layout.pipeline_parallel_size:
                raise ValueError("pipeline_partition must name the layers of each stage")
            return layout
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"cannot read {file}: {error!r}", param="model") from None

    def check(self, ctx: BuildContext, directory: Path) -> None:
        """ConfigError where this rank's place is none of this layout."""
        groups = ctx.groups
        sizes = (groups.tp.size, groups.pp.size) == (self.tensor_parallel_size, self.pipeline_parallel_size)
        sizes = sizes and (groups.ep.size > 1) == self.expert_parallel
        redundant = ctx.redundant_experts, self.redundant_experts
        if sizes and redundant[0] != redundant[1]:
            raise ConfigError(
                f"{directory} was saved for {self}, this is{_of_balance(ctx.redundant_experts) or ' without EPLB'}: "
                "set enable_eplb and num_redundant_experts as then, or save it again with `manta save-sharded`",
                param="enable_eplb" if None in redundant else "num_redundant_experts",
            )
        if sizes and (ctx.stage_layers is None or len(ctx.stage_layers) == self.pipeline_partition[groups.pp.rank]):
            return
        here = f"TP {groups.tp.size} x PP {groups.pp.size}"
        layers = "" if ctx.stage_layers is None else f" ({len(ctx.stage_layers)} layers in stage {groups.pp.rank})"
        layers += ", whole experts a rank" if groups.ep.size > 1 else ""
        raise ConfigError(
            f"{directory} was saved for {self}, this is {here}{layers}: set tensor_parallel_size, "
            "pipeline_parallel_size, pipeline_partition and enable_expert_parallel as then, or save it again with "
            "`manta save-sharded`",
            param="tensor_parallel_size",
        )


def _of_balance(redundant_experts: int | None) -> str:
    return "" if redundant_experts is None else f" with EPLB and num_redundant_experts={redundant_experts}"


def save_modules(found: Mapping[str, FoundModule], directory: Path) -> None:
    """Writes what the checkpoint called the modules of a quantized model and what it had of each, by our names; with
    the contents that its method looked at."""
    contents = {
        f"{own}.{leaf}": tensor.content
        for own, module in found.items()
        for leaf, tensor in module.tensors.items()
        if tensor.content is not None
    }
    names = {own: [module.name, {leaf: x.kind for leaf, x in module.tensors.items()}] for own, module in found.items()}
    save_file(contents, directory / MODULES, {"modules": json.dumps(names)})


def read_modules(directory: Path) -> dict[str, FoundModule]:
    """Reads what `save_modules` wrote; CheckpointError where it is not there."""
    file = directory / MODULES
    try:
        with safe_open(file, "pt") as opened:
            names = json.loads(opened.metadata()["modules"])
        contents = load_file(file)
        return {
            own: FoundModule(name, {leaf: _seen(contents.get(f"{own}.{leaf}"), *kind) for leaf, kind in leaves.items()})
            for own, (name, leaves) in names.items()
        }
    except (OSError, SafetensorError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"cannot read {file}: {error!r}; save it again with `manta save-sharded`") from None


def _seen(content: torch.Tensor | None, *kind: Any) -> SeenTensor:
    def read() -> torch.Tensor:
        raise CheckpointError(f"{MODULES} lacks what the method reads; save it again with `manta save-sharded`")

    return SeenTensor(kind[:-1], getattr(torch, kind[-1]), read, content)


class ShardedState(LoadFormat):
    """Reads what `save_rank` wrote."""

    def modules(self, model: EngineModel, directory: Path) -> dict[str, FoundModule]:
        """See LoadFormat."""
        return read_modules(directory)

    def fill(self, model: EngineModel, request: LoadRequest) -> None:
        """ConfigError names the layout of the directory where this is another."""
        Layout.read(request.directory).check(request.ctx, request.directory)
        reader = Reader()
        tensors = open_files(_files(request), reader)
        tensors = take_kv_scales(model, tensors, targets(model).keys())
        parameters = dict(model.named_parameters())
        if parameters.keys() != tensors.keys():
            odd = sorted(parameters.keys() ^ tensors.keys())
            raise CheckpointError(
                f"the sharded state in {request.directory} is of another model: {listed(odd)}", param="model"
            )
        for name, parameter in parameters.items():
            with named(tensors[name]):
                expect_shape(tensors[name], *parameter.shape)
            tensors[name].read_into(parameter.data)
        reader.read()


def save_rank(model: nn.Module, ctx: BuildContext, directory: Path, scales: dict[str, torch.Tensor]) -> None:
    """Write what this rank's filled model holds. `scales` are those of the KV cache, under the checkpoint's names."""
    held = {name: parameter.data for name, parameter in model.named_parameters()}
    for number, part in enumerate(_parts({**held, **scales})):
        save_file(part, directory / f"model-rank-{_rank(ctx)}-part-{number}.safetensors", {"format": "pt"})


def _parts(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Files of a size that any file system takes."""
    part: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if part and sum(other.nbytes for other in part.values()) + tensor.nbytes > MOST_FILE_BYTES:
            yield part
            part = {}
        part[name] = tensor
    yield part


def _rank(ctx: BuildContext) -> int:
    return ctx.groups.pp.rank * ctx.groups.tp.size + ctx.groups.tp.rank


def _files(request: LoadRequest) -> list[Path]:
    pattern = f"model-rank-{_rank(request.ctx)}-part-*.safetensors"
    files = sorted(request.directory.glob(pattern))
    if not files:
        raise CheckpointError(f"{request.directory} holds no {pattern}", param="model")
    return files
