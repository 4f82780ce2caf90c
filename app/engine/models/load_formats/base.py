"""What a load format does, and how those that hold tensors by the checkpoint's own names do it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from app.engine.layers.context import BuildContext
from app.engine.layers.weight import ShapeMismatch, Weight
from app.engine.models.base import EngineModel
from app.engine.models.checkpoint import StoredTensor
from app.engine.models.decoder import CausalLM
from app.engine.models.kv_scales import take_kv_scales
from app.engine.models.reader import Reader
from app.errors import CheckpointError

Target = tuple[Weight, str]  # parameter, and which of its parts


@dataclass(slots=True, frozen=True)
class LoadRequest:
    """What a model is to be filled from."""

    directory: Path
    ctx: BuildContext
    seed: int = 0  # of random weights
    elsewhere: Callable[[], set[str]] = field(default=set)  # names that other ranks are filled from


class LoadFormat(ABC):
    """Gives each parameter of a model, which has memory already, its weights."""

    @abstractmethod
    def fill(self, model: EngineModel, request: LoadRequest) -> None:
        """CheckpointError names what is missing, too much, misshapen or damaged."""


class NamedTensors(LoadFormat):
    """A format of files that hold tensors under the names of the model's family.

    Every tensor must have its place and every parameter its tensor. Nothing here knows layer names: parameters say
    what they are filled from (app/engine/layers/weight.py).
    """

    @abstractmethod
    def tensors(self, directory: Path, reader: Reader) -> dict[str, StoredTensor]:
        """All tensors of a directory, unread. CheckpointError names an unusable file."""

    def fill(self, model: EngineModel, request: LoadRequest) -> None:
        """Each rank reads its own shares only."""
        reader = Reader()
        stored = self.tensors(request.directory, reader).items()
        tensors = {own: part for name, tensor in stored for own, part in model.own_tensors(name, tensor)}
        places, elsewhere = targets(model), request.elsewhere()
        tensors = take_kv_scales(model, tensors, places.keys() | elsewhere)
        _check_names(model, tensors, places.keys() | elsewhere)
        for name, (weight, part) in places.items():
            with named(tensors[name]):
                weight.weight_loader(tensors[name], part)
        reader.read()


@contextmanager
def named(tensor: StoredTensor) -> Iterator[None]:
    """Turn a ShapeMismatch into a CheckpointError that names the tensor and its file."""
    try:
        yield
    except ShapeMismatch as error:
        raise CheckpointError(f"{tensor.name} in {tensor.file} {error}", param="model") from error


def targets(model: nn.Module) -> dict[str, Target]:
    """Checkpoint name -> parameter. Tied parameters appear once, under their first name."""
    found: dict[str, Target] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, Weight)
        module, _, leaf = name.rpartition(".")
        parent = module.rpartition(".")[0]
        if not parameter.spec.parts:
            found[name] = (parameter, "")
        for part in parameter.spec.parts:
            found[f"{parent}.{part}.{leaf}"] = (parameter, part)
    return found


def listed(names: list[str]) -> str:
    """Some of many names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _check_names(model: nn.Module, tensors: Mapping[str, StoredTensor], wanted: set[str]) -> None:
    missing = sorted(wanted - tensors.keys())
    if missing:
        raise CheckpointError(f"the checkpoint lacks {listed(missing)}", param="model")
    unexpected = sorted(name for name in tensors.keys() - wanted if not is_tolerated(name, model))
    if unexpected:
        raise CheckpointError(f"the checkpoint holds unexpected {listed(unexpected)}", param="model")


def is_tolerated(name: str, model: nn.Module) -> bool:
    """Whether a tensor without a place may be there: old checkpoints carry rotary tables, tied ones may carry the head
    a second time."""
    return name.endswith("rotary_emb.inv_freq") or (
        isinstance(model, CausalLM) and model.tied and name == "lm_head.weight"
    )
