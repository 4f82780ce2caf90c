"""One replacement of a model's weights in place, tensor by tensor, in whatever order they come.

A weight that the forward pass reads as it was loaded keeps its memory, and so its address, which CUDA graphs rely on.
One that was packed is loaded anew into memory of its own and packed as soon as all of its layer is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.reader import DirectReader
from app.errors import CheckpointError
from app.layers.attention_layer import AttentionLayer
from app.layers.derived_layer import derive
from app.layers.quantized_layer import QuantizedLayer
from app.layers.vocab import LMHead
from app.layers.weight import ShapeMismatch, Weight
from app.loading.kv_scales import find_kv_scales, take_kv_scales
from app.loading.load_formats.base import RankNames, is_tolerated, listed
from app.loading.quantized_modules import unused_names
from app.models.base import EngineModel


@dataclass(slots=True, frozen=True)
class GivenTensor(StoredTensor):
    """A tensor in memory under its name in the checkpoint; `file` says where it comes from, for people."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, source: str = "the update") -> GivenTensor:
        """All of it is there, on any device."""
        return cls(name, Path(source), tensor, 0, DirectReader())

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """See StoredTensor.narrow; not copied."""
        return self.mapped.narrow(dim, start, length)

    def whole(self) -> torch.Tensor:
        """See StoredTensor.whole; not copied."""
        return self.mapped

    def read_into(self, target: torch.Tensor, dim: int = 0, start: int = 0) -> None:
        """See StoredTensor.read_into; at once."""
        target.copy_(self.mapped.narrow(dim, start, target.shape[dim]) if target.ndim else self.mapped)


NO_NAMES = RankNames()


class _Fits(Exception):
    """A probe was asked for its data: its shape is right."""


@dataclass(slots=True, frozen=True)
class _Probe:
    """A tensor's shape and type without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def reshaped(self, *shape: int) -> _Probe:
        """A probe of as many numbers in another shape."""
        return _Probe(shape, self.dtype)

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Comes after the look at the shape."""
        raise _Fits

    def read_into(self, target: torch.Tensor, dim: int = 0, start: int = 0) -> None:
        """Comes after it too."""
        raise _Fits


@dataclass(slots=True, frozen=True)
class _Place:
    """Names where a tensor of a checkpoint goes: `leaf` of `module`, or the part of it that is fused into it."""

    module: nn.Module
    leaf: str
    part: str

    @property
    def weight(self) -> Weight:
        """The parameter, as it is now."""
        weight = getattr(self.module, self.leaf)
        assert isinstance(weight, Weight)
        return weight


class WeightUpdate:
    """Begun, fed with tensors, finished. Until it is finished the model must not compute."""

    def __init__(self, model: EngineModel, device: torch.device, elsewhere: RankNames = NO_NAMES) -> None:
        """`elsewhere`: names of tensors that other pipeline stages take."""
        self._model = model
        self._device = device
        self._places = _places(model)
        self._names = self._places.keys() | elsewhere.filled
        self._unused = unused_names(model) | elsewhere.unused
        self._missing = set(self._places)
        self._left = _count(self._places)  # tensors still to come, by module
        self.replaced_memory = False  # whether a weight lies elsewhere than before

    def check(self, tensors: Mapping[str, StoredTensor]) -> None:
        """CheckpointError unless these are all tensors of the model, in their shapes; nothing is read or changed."""
        own = self._own(tensors)
        missing = sorted(self._names - own.keys())
        if missing:
            raise CheckpointError(f"the update lacks {listed(missing)}", param="model")
        for name, tensor in own.items():
            if name in self._places:
                self._check_shape(name, _Probe(tensor.shape, tensor.dtype))

    def _is_left_over(self, name: str) -> bool:
        return name not in self._names and (name in self._unused or is_tolerated(name, self._model))

    def _check_shape(self, name: str, probe: _Probe) -> None:
        place = self._places[name]
        try:
            place.weight.weight_loader(probe, place.part)
        except _Fits:
            return
        except ShapeMismatch as error:
            raise CheckpointError(f"{name} {error}", param="model") from error

    def load(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Take in these tensors. CheckpointError names one that has no place, another shape, or came before."""
        for name, tensor in take_kv_scales(self._model, self._own(tensors), self._names).items():
            if name in self._missing:
                self._load_one(name, tensor)
            elif name in self._places:
                raise CheckpointError(f"{name} comes a second time", param="names")

    def _own(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """The tensors of this model under the names that it has for them."""
        named = (part for name, tensor in tensors.items() for part in self._model.own_tensors(name, tensor))
        own = {name: tensor for name, tensor in named if not self._is_left_over(name)}
        unknown = sorted(set(own) - self._names - find_kv_scales(own, self._names).keys())
        if unknown:
            raise CheckpointError(f"the model has no {listed(unknown)}", param="names")
        return own

    def forget_kv_scales(self) -> None:
        """Forgets what the checkpoint before said of a quantized KV cache."""
        for module in self._model.modules():
            if isinstance(module, AttentionLayer):
                module.reset_kv_scales()

    def _load_one(self, name: str, tensor: StoredTensor) -> None:
        place = self._places[name]
        if place.weight.is_meta:  # the layer keeps it packed
            setattr(place.module, place.leaf, place.weight.materialize(self._device))
            self.replaced_memory = True
        try:
            place.weight.weight_loader(tensor, place.part)
        except ShapeMismatch as error:
            raise CheckpointError(f"{name} in {tensor.file} {error}", param="names") from error
        self._missing.remove(name)
        self._left[place.module] -= 1
        if not self._left[place.module] and isinstance(place.module, QuantizedLayer):
            place.module.pack()

    def note_all_loaded(self) -> None:
        """Note that somebody else has loaded and packed every weight."""
        self._missing.clear()
        self.replaced_memory = True

    def finish(self, *, whole: bool) -> None:
        """The model may compute again. CheckpointError where a tensor is missing: `whole`, any; else one of a layer
        that keeps its weight packed, of which others came."""
        missing = sorted(self._missing if whole else self._half_loaded())
        if missing:
            raise CheckpointError(f"the update lacks {listed(missing)}", param="names")
        for module in self._model.modules():
            if isinstance(module, LMHead) and module.tied:
                module.pack()
                self.replaced_memory |= module.made is not None
        derive(self._model)

    def _half_loaded(self) -> set[str]:
        return {
            name
            for name in self._missing
            if isinstance(module := self._places[name].module, QuantizedLayer)
            and not self._places[name].weight.is_meta
            and module.made is not None
            and not getattr(module, "tied", False)
        }


def drop_packed(model: nn.Module) -> None:
    """Free what layers have packed in a form of their own kernel's, which no storage can be taken from."""
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.drop_packed()


def _places(model: nn.Module) -> dict[str, _Place]:
    """Checkpoint name -> place. A tied parameter appears once, under its first name."""
    places: dict[str, _Place] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, Weight)
        path, _, leaf = name.rpartition(".")
        module, parent = model.get_submodule(path), path.rpartition(".")[0]
        stored = parameter.spec.leaf or leaf
        for part in parameter.spec.parts or ("",):
            places[f"{parent}.{part}.{stored}" if part else f"{path}.{stored}"] = _Place(module, leaf, part)
    return places


def _count(places: Mapping[str, _Place]) -> dict[nn.Module, int]:
    left: dict[nn.Module, int] = {}
    for place in places.values():
        left[place.module] = left.get(place.module, 0) + 1
    return left
