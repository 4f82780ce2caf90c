"""Brings the states of layers up to the draft tokens that stay.

A step that verifies drafts leaves the states of their requests as they were before it (`kernels/recurrent`). Once its
tokens are sampled, and before anything else reads a state, those of the tokens that are no wrong drafts go through it.
Earlier stages of a pipeline hear of it later, and compute steps of other requests until then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from app.kernels.recurrent import DraftRoom
from app.layers.context import ForwardContext
from app.layers.state_layer import StateLayer, state_step
from app.worker.attention.kv_cache import KVCache


class DraftedStates:
    """Those of all layers of a rank that keep any; at least one does."""

    def __init__(self, layers: Sequence[StateLayer], num_places: int) -> None:
        """`num_places`: for the tokens of all requests with drafts; made before the KV cache is sized, so that the
        memory is counted."""
        self._layers = layers
        for layer in layers:
            layer.make_room(num_places)

    def accept(self, ctx: ForwardContext, num_new: torch.Tensor) -> None:
        """The step's requests with drafts have got so many tokens int64 [D]: as many of those that they brought stay.
        A step over static tensors may have more requests than these, behind them."""
        drafts = state_step(ctx, self._layers[0]).drafts
        assert drafts is not None, "a step without drafts has written its states"
        accepted = drafts.accepted(num_new)
        for layer in self._layers:
            layer.accept(ctx.states[layer.layer_index], accepted)


class RelayedStates:
    """The same of a stage before the last one."""

    def __init__(self, layers: Sequence[StateLayer], cache: KVCache, room: DraftRoom) -> None:
        """As DraftedStates; `cache` holds the states."""
        self._layers, self._cache, self._room = layers, cache, room
        for layer in layers:
            layer.make_room(room.num_places, room)

    def accept(self, rows: torch.Tensor, num_new: torch.Tensor) -> None:
        """Rows int64 [D] have got so many tokens int64 [D] in the last step with drafts that each was in."""
        accepted = self._room.accepted(rows, num_new)
        for layer in self._layers:
            layer.accept(self._cache.states[layer.layer_index], accepted)
