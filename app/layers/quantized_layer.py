"""Layers whose weights a quantization method stores: which method, each part's name in the checkpoint decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from app.layers.layer import Layer
from app.quantization.base import ModuleKind, QuantMethod


@dataclass(slots=True, frozen=True)
class LayerPart:
    """One linear layer of a checkpoint that is in a layer of ours."""

    num_outputs: int  # over all ranks
    num_inputs: int
    has_bias: bool = False


class QuantizedLayer(Layer, ABC):
    """Made with plain weights; then told its methods, while it has no memory; filled; packed."""

    kind: ClassVar[ModuleKind] = "linear"
    stays_plain: ClassVar[bool] = False  # no method that rounds plain weights has it: it takes what a checkpoint stores
    methods: Mapping[str, QuantMethod] = MappingProxyType({})  # of its parts; one that is not among them is plain

    @property
    @abstractmethod
    def quantized_parts(self) -> Mapping[str, LayerPart]:
        """Its linear layers in the checkpoint, by the names that stand in place of its own ("": its own)."""

    @abstractmethod
    def store(self, methods: Mapping[str, QuantMethod]) -> None:
        """Have each part stored as its method says: the layer's parameters are then what the checkpoint holds."""

    @abstractmethod
    def pack(self) -> None:
        """Turn the loaded tensors into what multiplies. Their shapes stay, their memory is freed."""

    @property
    @abstractmethod
    def made(self) -> object:
        """Returns what packing made: a dataclass of tensors, or one. None: the layer multiplies with what was
        loaded."""

    @abstractmethod
    def drop_packed(self) -> None:
        """Free what was packed."""
