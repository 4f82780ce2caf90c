"""The base of layers that keep a state of each request instead of its tokens: recurrent ones and short convolutions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable

import torch

from app.kernels.attention import AttentionMetadata
from app.kernels.recurrent import RECURRENT_OPS, StateStep
from app.layers.attention_layer import AttentionLayer
from app.layers.cache_spec import LayerStateSpec
from app.layers.context import BuildContext, ForwardContext


class StateLayer(AttentionLayer):
    """Stands where other layers attend. It caches nothing of tokens, so windows and shared prefixes are none of its
    concern."""

    is_capturable = True
    shares_prefixes = True

    def __init__(self, ctx: BuildContext, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.state_dtype = ctx.state_dtype
        self.ops = RECURRENT_OPS.on(ctx.device)

    @property
    def plan_key(self) -> Hashable:
        """All of them see the same of a step."""
        return "states"

    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """Find the states of the step's requests."""
        meta.plan = StateStep.of(meta)

    def cache_spec(self) -> None:
        """Nothing of tokens."""
        return None

    @abstractmethod
    def state_spec(self) -> LayerStateSpec:
        """Returns what the layer keeps of each request on this rank."""

    def of_step(self, ctx: ForwardContext) -> tuple[StateStep, tuple[torch.Tensor, ...]]:
        """The step's requests, and the states of all: a tensor [slots, ...] for each of `state_spec`."""
        step = ctx.attention[self.layer_index].plan
        assert isinstance(step, StateStep)
        return step, ctx.states[self.layer_index]
