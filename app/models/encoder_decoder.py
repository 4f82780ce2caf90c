"""Says what joins a decoder and the encoder whose output its layers attend to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.cross_attention import CrossAttention
from app.layers.layer import Layer
from app.models.decoder import CausalLM
from app.records.encoder_info import EncoderInfo

FEATURE = "app.worker.media.encoder_inputs:create"
OWN = "encoder."  # where an encoder's tensors stand in the model


class InputEncoder(Layer):
    """Turns inputs into what a decoder attends to. Every rank holds all of it, as each has layers that attend."""

    info: EncoderInfo
    is_capturable: ClassVar[bool] = False  # whether a call with one input of the largest size can be recorded
    rules: ClassVar[Sequence[Rule]] = ()  # from a checkpoint's names behind the encoder's prefix to ours

    @abstractmethod
    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """States [n, C] of all inputs' positions, one input behind the other."""

    @abstractmethod
    def largest(self) -> torch.Tensor:
        """An input of as many positions as there can be, to be measured and warmed with."""

    def constants(self) -> object:
        """Returns what encoding one such input reads beside weights and the input; it lives as long as the encoder."""
        return None

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """A tensor of the checkpoint, without the encoder's prefix, under our own names."""
        return [(renamed(name, self.rules), tensor)]


class EncoderDecoder(CausalLM):
    """A decoder with cross attention and its encoder."""

    features: tuple[str, ...] = (FEATURE,)
    encoder_prefixes: ClassVar[tuple[str, ...]] = ("model.encoder.", "encoder.")

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__(ctx, info)
        self.encoder = self.encoder_of(ctx, info)

    @classmethod
    @abstractmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> InputEncoder:
        """The encoder that config.json describes."""

    @property
    def cross_layers(self) -> list[CrossAttention]:
        """The layers of this stage that attend to it."""
        return [layer for layer in self.model.modules() if isinstance(layer, CrossAttention)]

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The decoder's as its family has it, the encoder's."""
        for prefix in self.encoder_prefixes:
            if name.startswith(prefix):
                own = self.encoder.own_tensors(name.removeprefix(prefix), tensor)
                return [(OWN + part, stored) for part, stored in own]
        return super().own_tensors(name, tensor)


def encoder_info(info: ModelInfo) -> EncoderInfo:
    """Returns what the encoder of such a model reads."""
    found = EncoderInfo.of(info)
    if found is None:
        raise UnsupportedError(f"{info.architecture}: nothing is known of its encoder", param="model")
    return found
