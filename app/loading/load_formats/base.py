"""Says what a load format does, and how those that hold tensors by the checkpoint's own names do it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.reader import Reader
from app.errors import CheckpointError
from app.layers.context import BuildContext
from app.layers.weight import ShapeMismatch, Weight
from app.loading.kv_scales import take_kv_scales
from app.loading.quantized_modules import FoundModule, leaves_of, modules_of, unused_names
from app.models.base import EngineModel
from app.models.decoder import CausalLM
from app.quantization.plain import PLAIN_METHOD

Target = tuple[Weight, str]  # parameter, and which of its parts


@dataclass(slots=True, frozen=True)
class RankNames:
    """Names in a checkpoint that all ranks know together."""

    filled: frozenset[str] = frozenset()  # what some rank is filled from
    unused: frozenset[str] = frozenset()  # what may be there, and no rank needs


@dataclass(slots=True, frozen=True)
class LoadRequest:
    """Says what a model is to be filled from."""

    directory: Path
    ctx: BuildContext
    seed: int = 0  # of random weights
    elsewhere: Callable[[], RankNames] = field(default=RankNames)


class LoadFormat(ABC):
    """Gives each parameter of a model, which has memory already, its weights."""

    def names(self, directory: Path) -> Collection[str]:
        """Names of all tensors as their family has them, before there is a model; none where it cannot tell."""
        return ()

    def modules(self, model: EngineModel, directory: Path) -> dict[str, FoundModule] | None:
        """The modules of a quantized checkpoint by our names, before the model has memory; None: it cannot tell, so
        that names are taken for ours."""
        return None

    @abstractmethod
    def fill(self, model: EngineModel, request: LoadRequest) -> None:
        """CheckpointError names what is missing, too much, misshapen or damaged."""


class NamedTensors(LoadFormat):
    """A format of files that hold tensors under the names of the model's family.

    Every tensor must have its place and every parameter its tensor. Nothing here knows layer names: parameters say
    what they are filled from (app/layers/weight.py).
    """

    @abstractmethod
    def tensors(self, directory: Path, reader: Reader) -> dict[str, StoredTensor]:
        """All tensors of a directory, unread. CheckpointError names an unusable file."""

    def names(self, directory: Path) -> Collection[str]:
        """See LoadFormat."""
        return self._open(directory)[1].keys()

    _opened: tuple[Reader, dict[str, StoredTensor]] | None = None

    def modules(self, model: EngineModel, directory: Path) -> dict[str, FoundModule] | None:
        """See LoadFormat."""
        return modules_of(model, self._open(directory)[1])

    def _open(self, directory: Path) -> tuple[Reader, dict[str, StoredTensor]]:
        """All tensors, and who reads them; opened once."""
        if self._opened is None:
            reader = Reader()
            self._opened = reader, self.tensors(directory, reader)
        return self._opened

    def fill(self, model: EngineModel, request: LoadRequest) -> None:
        """Each rank reads its own shares only."""
        reader, stored = self._open(request.directory)
        if request.ctx.quantization is not PLAIN_METHOD:
            leaves = leaves_of(model, modules_of(model, stored), request.ctx.dtype)
            stored = {name: replace(tensor, leaf=leaves.get(name)) for name, tensor in stored.items()}
        own = (pair for name, tensor in stored.items() for pair in model.own_tensors(name, tensor))
        places, elsewhere = targets(model), request.elsewhere()
        wanted, unused = places.keys() | elsewhere.filled, unused_names(model) | elsewhere.unused
        tensors = {name: tensor for name, tensor in own if name not in unused}
        tensors = take_kv_scales(model, tensors, wanted)
        _check_names(model, tensors, wanted)
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
        parent, leaf = module.rpartition(".")[0], parameter.spec.leaf or leaf
        if not parameter.spec.parts:
            found[f"{module}.{leaf}" if module else leaf] = (parameter, "")
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
    """True if a tensor without a place may be there: old checkpoints carry rotary tables, tied ones may carry the head
    a second time."""
    return name.endswith("rotary_emb.inv_freq") or (
        isinstance(model, CausalLM) and model.tied and name == "lm_head.weight"
    )
