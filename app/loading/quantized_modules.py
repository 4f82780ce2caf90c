"""Each linear layer gets its quantization method by the name that the checkpoint has for it.

A family may rename what a checkpoint holds, and layers fuse several of its modules; so the names are found by having
the model say where each tensor of the checkpoint goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.leaf import Leaf
from app.layers.quantized_layer import LayerPart, QuantizedLayer
from app.models.base import EngineModel
from app.quantization.base import QuantMethod, StoredModule
from app.quantization.config_fields import named_errors
from app.quantization.plain import PLAIN_METHOD


@dataclass(slots=True)
class SeenTensor:
    """A tensor of a checkpoint that a method may look at; what it looked at is kept."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    content: torch.Tensor | None = None

    @property
    def kind(self) -> list[int | str]:
        """Its sizes and the name of its type."""
        return [*self.shape, str(self.dtype).removeprefix("torch.")]

    def whole(self) -> torch.Tensor:
        """All of it."""
        if self.content is None:
            self.content = self.read()
        return self.content


@dataclass(slots=True, frozen=True)
class FoundModule:
    """A module of a checkpoint."""

    name: str
    tensors: dict[str, SeenTensor] = field(default_factory=dict)  # by what stands behind its name


def quantized_parts(model: nn.Module) -> Iterator[tuple[str, QuantizedLayer, str]]:
    """Our name of each linear layer as checkpoints know them, the layer that holds it, and what it calls it."""
    for path, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            parent = path.rpartition(".")[0]
            for part in layer.quantized_parts:
                yield (f"{parent}.{part}" if part else path), layer, part


def modules_of(model: EngineModel, tensors: Mapping[str, StoredTensor]) -> dict[str, FoundModule]:
    """The modules of a checkpoint by our names."""
    known = {name for name, _, _ in quantized_parts(model)}
    found: dict[str, FoundModule] = {}
    for name, tensor in tensors.items():
        for own, _ in model.own_tensors(name, tensor):
            module, leaf = _split(own, known)
            if module:
                stored = name.removesuffix("." + leaf) if name.endswith("." + leaf) else name.rpartition(".")[0]
                seen = SeenTensor(tensor.shape, tensor.dtype, tensor.whole)
                found.setdefault(module, FoundModule(stored)).tensors[leaf] = seen
    return found


def _split(name: str, modules: set[str]) -> tuple[str, str]:
    """A tensor's name as its module's and the rest; a leaf's name may hold dots."""
    module = name.rpartition(".")[0]
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return module, name[len(module) + 1 :]


def store_quantized(
    model: nn.Module, method: QuantMethod, dtype: torch.dtype, found: Mapping[str, FoundModule] | None
) -> None:
    """Have every layer stored as `method` says for its modules. None: there is no checkpoint to look at.

    Callers have the meta device set. UnsupportedError, CheckpointError name a module that cannot be read.
    """
    methods: dict[QuantizedLayer, dict[str, QuantMethod]] = {}
    parts = _sizes(model)
    rows = _rows_of_modules(parts, found or {})
    for name, (layer, part, size) in parts.items():
        module = FoundModule(name) if found is None else found.get(name, FoundModule(name))
        first, count = rows.get(name, (0, size.num_outputs))
        stored = StoredModule(
            name=module.name,
            kind=layer.kind,
            dtype=dtype,
            num_outputs=count,
            num_inputs=size.num_inputs,
            has_bias=size.has_bias,
            tensors=None if found is None else module.tensors,
            first_output=first,
        )
        with torch.device("cpu"), named_errors(module.name):  # where it may look at tensors
            keeps = layer.stays_plain and (stored.tensors is None or stored.is_plain)
            chosen = None if keeps else method.method_of(stored)
            methods.setdefault(layer, {})[part] = chosen or PLAIN_METHOD
    for layer, of_parts in methods.items():
        layer.methods = of_parts
        layer.store(of_parts)


_Part = tuple[QuantizedLayer, str, LayerPart]


def _sizes(model: nn.Module) -> dict[str, _Part]:
    """The layer of each linear layer that checkpoints know, by our name, what the layer calls it, and its size."""
    sizes: dict[QuantizedLayer, Mapping[str, LayerPart]] = {}
    parts: dict[str, _Part] = {}
    for name, layer, part in quantized_parts(model):
        if layer not in sizes:
            sizes[layer] = layer.quantized_parts
        parts[name] = (layer, part, sizes[layer][part])
    return parts


def _rows_of_modules(parts: Mapping[str, _Part], found: Mapping[str, FoundModule]) -> dict[str, tuple[int, int]]:
    """Finds where each part begins in its module of the checkpoint, and how many rows that has."""
    ends: dict[tuple[QuantizedLayer, str], int] = {}
    first: dict[str, int] = {}
    for name in (name for name in found if name in parts):  # in the checkpoint's order
        layer, _, size = parts[name]
        first[name] = ends.get((layer, found[name].name), 0)
        ends[layer, found[name].name] = first[name] + size.num_outputs
    return {name: (start, ends[parts[name][0], found[name].name]) for name, start in first.items()}


def leaves_of(model: nn.Module, found: Mapping[str, FoundModule], dtype: torch.dtype) -> dict[str, Leaf]:
    """The leaves that tensors of a checkpoint are, by the checkpoint's names."""
    return {
        f"{found[name].name}.{leaf.name}": leaf
        for name, layer, part in quantized_parts(model)
        if name in found
        for leaf in layer.methods.get(part, PLAIN_METHOD).leaves(dtype)
    }


def unused_names(model: nn.Module) -> set[str]:
    """Our names of tensors that a checkpoint may hold beside the leaves, and nobody needs."""
    return {
        f"{name}.{leaf}"
        for name, layer, part in quantized_parts(model)
        for leaf in layer.methods.get(part, PLAIN_METHOD).unused
    }
