"""Says what the worker needs of any model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.errors import UnsupportedError
from app.layers.attention_layer import AttentionLayer
from app.layers.context import ForwardContext
from app.layers.layer import Layer
from app.models.layer_offload import LayerOffload


class EngineModel(Layer, ABC):
    """Hidden states of a step's tokens; logits where there is a language head."""

    offload: LayerOffload | None = None  # where weights of some layers stay in host memory
    # What it wants of the worker besides, as "module:attribute": makes a WorkerFeature (worker/features), or None.
    features: tuple[str, ...] = ()
    keeps_inputs: bool = False  # whether it shows what its layers read (ForwardContext.keep)
    heeds_read: bool = False  # whether it gives the hidden states of some tokens alone (ForwardContext.read)
    # Whether PEFT takes inputs and outputs of its layers' experts for each other (loading/adapter_experts.py).
    swaps_expert_adapters: bool = False

    def longest_at_once(self, rows: int) -> int | None:
        """Tokens of a row's context up to which a step of so many rows, with a token each, computes all layers at once,
        known once there are weights; 0: it never does, None: whatever their number."""
        return 0

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C] after the last layer."""

    def offload_layers(self, num_bytes: int, device: torch.device) -> LayerOffload:
        """Choose layers whose weights stay in host memory, while there is no memory yet. UnsupportedError."""
        raise UnsupportedError("cpu_offload_gb is for decoders that generate", param="cpu_offload_gb")

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """A tensor of the checkpoint under our names: itself, its parts, or nothing where it has no use."""
        own = self.own_name(name)
        return [] if own is None else [(own, tensor)]

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] of the rows that need them -> [N, V] in the model's type; in the last stage."""
        raise AssertionError("a model without a language head")

    def own_name(self, name: str) -> str | None:
        """Returns what a tensor of the checkpoint is called here; None for one that the model has no use for."""
        return name

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The attention layers in the order of their `layer_index`."""
        return [module for module in self.modules() if isinstance(module, AttentionLayer)]
